"""The trainer: what a rank does from its start to its end."""
