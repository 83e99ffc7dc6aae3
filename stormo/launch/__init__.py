"""Starts the ranks (`agent`) and, inside one, reads who it is (`detect`): one launcher a file.

A rank's end or failure reaches the others through its `lifeline`. Standard library only.
"""

from __future__ import annotations

from stormo.launch.agent import run_node
from stormo.launch.lifeline import Lifeline, open_lifeline
from stormo.launch.local import Node
from stormo.launch.meeting_point import MeetingPoint
from stormo.launch.patience import Patience
from stormo.launch.place import DEFAULT_MASTER_PORT, Place, alone
from stormo.launch.ranks import Board

__all__ = [
    "DEFAULT_MASTER_PORT",
    "Board",
    "Lifeline",
    "MeetingPoint",
    "Node",
    "Patience",
    "Place",
    "alone",
    "open_lifeline",
    "run_node",
]
