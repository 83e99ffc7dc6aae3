"""Hostile files and hostile peers against stormo, as another user of the same machine."""
