"""The clock: whether something keeps it right, which only nodes that agree on the time can be compared by."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

from stormo.doctor.finding import Finding
from stormo.doctor.machine import Machine

_UNSYNCHRONISED = 0x40  # STA_UNSYNC
_ERROR = 5  # TIME_ERROR
_WORST_US = 100_000
_FIRST_S, _LAST_S = 1_767_225_600, 4_102_444_800  # 2026 and 2100
_SLOW_SOURCES = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")
_MEND = "start a time service: systemctl enable --now chronyd (or systemd-timesyncd); in a container, on its host"


class _Timex(ctypes.Structure):
    """What the kernel says of its clock (adjtimex(2)); only the first fields matter here."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def ask_kernel() -> tuple[bool, int] | None:
    """Whether the kernel holds its clock for synchronised, and by how many microseconds it may be off."""
    try:
        timex, adjtimex = _Timex(), ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None
    state = adjtimex(ctypes.byref(timex))  # modes is 0: asks only
    if state < 0:
        return None
    return state != _ERROR and not timex.status & _UNSYNCHRONISED, int(timex.maxerror)


def check(
    machine: Machine,
    ask: Callable[[], tuple[bool, int] | None] = ask_kernel,
    now: Callable[[], float] = time.time,
) -> Iterator[Finding]:
    """Whether the clock is right, as far as one machine can know."""
    now_s = now()
    if not _FIRST_S <= now_s <= _LAST_S:
        text = f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now_s))}"
        mend = "set it: certificates, schedulers and file times all depend on it"
        yield Finding(check="clock-date", level="error", text=text, mend=mend, facts={"time_unix_s": now_s})
    known = ask()
    if known is None:
        yield Finding(check="clock-sync", level="note", text="the kernel does not tell whether its clock is kept right")
    elif not known[0]:
        text = "nothing keeps the clock right: times of several nodes will drift apart"
        yield Finding(check="clock-sync", level="warning", text=text, mend=_MEND, facts={"is_synchronised": False})
    else:
        facts = {"is_synchronised": True, "error_at_most_s": known[1] / 1e6}
        text = f"kept right by a time service, to {known[1] / 1000:.1f} ms at worst"
        if known[1] > _WORST_US:
            mend = "see why its source is so far away: chronyc tracking, timedatectl timesync-status"
            yield Finding(check="clock-sync", level="warning", text=text, mend=mend, facts=facts)
        else:
            yield Finding(check="clock-sync", level="ok", text=text, facts=facts)
    source = machine.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in _SLOW_SOURCES:
        text = f"the kernel reads the time from {source}, which takes microseconds a call"
        mend = "have the administrator find out (dmesg) why the kernel does not trust tsc"
        yield Finding(check="clock-source", level="note", text=text, mend=mend, facts={"clock_source": source})
