"""What a run leaves behind: its folder, its records, its checkpoints and its summary."""

from stormo.journal.journal import Journal

__all__ = ["Journal"]
