"""What a run that goes on has to say before its first step: where it is, and what became of it before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.errors import counted
from stormo.telemetry.record import Notice
from stormo.training.divergence import STEADYING
from stormo.training.progress import Progress


def past_end(name: str, progress: Progress, plan: Plan) -> Notice:
    """What is said of a run that has nothing left to do."""
    done = progress.epoch - 1
    if done == plan.epochs:
        return _all_done(name, plan)
    text = f"{name} has done {counted(done, 'epoch')} already, of {plan.epochs} now; it is left as it is"
    return Notice(kind="info", text=f"{text}: set --epochs above {done} to train on")


def _all_done(name: str, plan: Plan) -> Notice:
    text = f"{name} has done its {counted(plan.epochs, 'epoch')}; raise --epochs to train on"
    return Notice(kind="info", text=text)


def notices_of_start(
    config: TrainConfig, plan: Plan, progress: Progress, name: str, summary: Mapping[str, Any]
) -> Iterator[Notice]:
    """What the user should know of a run named so, as far as it goes on.

    Args:
        config: its settings.
        plan: what they come to.
        progress: how far it is.
        name: of the run.
        summary: how it ended the last time; empty where that is not known.
    """
    goes_on = config.run.resume is not None
    if progress.num_resumes and progress.epoch > plan.epochs:
        yield _all_done(name, plan)
    lost_at = summary.get("diverged_at_step") if summary.get("stopped_by") == "divergence" else None
    if goes_on and not progress.num_resumes and lost_at is None:
        yield Notice(kind="info", text=f"{name} has no checkpoint yet: it starts from the beginning")
    if progress.num_rollbacks:
        times = counted(progress.num_rollbacks, "rollback")
        text = f"after {times} the learning rate is × {progress.rate_factor:g} of the schedule"
        yield Notice(kind="info", text=text)
    if goes_on and lost_at is not None:
        way = f"; it goes on from step {progress.step}"
        if not progress.num_resumes:
            way = " and has no good checkpoint: it starts from the beginning"
        text = f"{name} diverged at step {lost_at}{way}"
        if not STEADYING & {change.key for change in config.changed}:
            text += " with the same settings and would diverge there again: set a lower --base-lr, or --clip-norm"
        yield Notice(kind="warning", text=text)
