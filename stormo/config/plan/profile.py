"""`--profile SPEC`: which steps are recorded, read and checked before anything runs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stormo.errors import SettingError, counted

WARM_UP_STEPS = 5  # after the first of a start, in which memory is taken up and kernels are tuned
_MOST_STEPS = 1000  # a step is thousands of events, and all of them are held in memory until the last
_FORMS = "set START:STOP (10:20 records the steps 10 to 19), a number of steps (10), or nvtx"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSpec:
    """What `--profile` asks for."""

    first: int | None = None  # step, counted from 1 as in the records; None for the first after a warm-up
    num_steps: int = 0
    nvtx: bool = False  # only ranges for Nsight

    def window(self, start: int) -> range:
        """The steps to record, in a run that starts or goes on with this step."""
        first = start + 1 + WARM_UP_STEPS if self.first is None else self.first
        return range(first, first + self.num_steps)


def parse_profile(text: str) -> ProfileSpec:
    """Read SPEC; `SettingError` where it names no steps."""
    if text == "nvtx":
        return ProfileSpec(nvtx=True)
    found = re.fullmatch(r"(?:(\d{1,15}):)?(\d{1,15})", text, re.ASCII)
    if found is None:
        raise _refusal(text, "that names no steps", _FORMS)
    first, last = found.groups()
    if first is None:
        spec = ProfileSpec(num_steps=int(last))
    else:
        if int(first) < 1:
            raise _refusal(text, "steps are counted from 1", f"set --profile 1:{max(2, int(last))}")
        if int(last) <= int(first):
            why = f"it stops before step {int(last)} and would start with step {int(first)}"
            raise _refusal(text, why, _FORMS)
        spec = ProfileSpec(first=int(first), num_steps=int(last) - int(first))
    if not spec.num_steps:
        raise _refusal(text, "no step would be recorded", _FORMS)
    if spec.num_steps > _MOST_STEPS:
        why = f"that is {spec.num_steps} steps and a recording is held in memory, so that {_MOST_STEPS} are the most"
        raise _refusal(text, why, "set fewer; ten show what all of them do")
    return spec


def check_profile(text: str, num_steps: int) -> ProfileSpec:
    """Read SPEC for a run of so many steps at most; `SettingError` where all of its steps come later."""
    spec = parse_profile(text)
    if not spec.nvtx and spec.window(1).start > num_steps:
        first = spec.window(1).start
        why = f"it begins with step {first}" + f", after a warm-up of {WARM_UP_STEPS}" * (spec.first is None)
        why += f", and the run has {counted(num_steps, 'step')}"
        raise _refusal(text, why, f"set --profile 1:{num_steps + 1} or earlier steps, or train longer")
    return spec


def _refusal(text: str, why: str, instead: str) -> SettingError:
    return SettingError(f"--profile {text} was set", why, instead)
