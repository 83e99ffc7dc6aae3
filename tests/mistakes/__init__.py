"""Mistakes in users' code, and what stormo says of each: `table.py` has them, docs/mistakes.md is made of it."""
