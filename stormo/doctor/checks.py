"""The table of all checks of one machine; a check is one function, and one row here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from stormo.doctor import backends, clock, devices, energy, libraries, limits, network, schedulers, storage
from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine
from stormo.doctor.torch_facts import LIMIT_S


class Check(NamedTuple):
    """What looks at one part of a machine, and how long it may take."""

    run: Callable[[Machine], Iterable[Finding]]
    limit_s: float


# In the order they are shown.
CHECKS: dict[str, Check] = {
    "devices": Check(devices.check, 20.0),
    "libraries": Check(libraries.check, LIMIT_S + 10.0),
    "backends": Check(backends.check, LIMIT_S + 10.0),
    "network": Check(network.check, 15.0),
    "storage": Check(storage.check, 30.0),
    "limits": Check(limits.check, 10.0),
    "clock": Check(clock.check, 5.0),
    "schedulers": Check(schedulers.check, 30.0),
    "energy": Check(energy.check, 10.0),
}
