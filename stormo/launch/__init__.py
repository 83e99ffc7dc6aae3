"""Starts the ranks and, inside one, reads who it is: one launcher a file."""
