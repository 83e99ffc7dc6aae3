"""Starts the ranks (`agent`) and, inside one, reads who it is (`detect`): one launcher a file.

A rank's end or failure reaches the others through `failure_reporter`. Standard library only.
"""

from __future__ import annotations

from stormo.launch.agent import run_node
from stormo.launch.environments.local import Node
from stormo.launch.failure_reporter import AddressBook, FailureReporter, open_failure_reporter
from stormo.launch.rank_info import DEFAULT_MASTER_PORT, RankInfo, alone
from stormo.launch.rendezvous import StoreAddress
from stormo.launch.worker_group import AgentTimeouts

__all__ = [
    "DEFAULT_MASTER_PORT",
    "AddressBook",
    "AgentTimeouts",
    "FailureReporter",
    "Node",
    "RankInfo",
    "StoreAddress",
    "alone",
    "open_failure_reporter",
    "run_node",
]
