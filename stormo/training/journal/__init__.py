"""What a run leaves behind: its folder, its records, its checkpoints and its summary."""

from stormo.training.journal.journal import Journal

__all__ = ["Journal"]
