"""`stormo monitor`: the GPUs, processors, memory, disks and network of this node, live, beside any program."""

from stormo.commands.monitor.command import main

__all__ = ["main"]
