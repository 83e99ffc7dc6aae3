"""A run that goes on with other settings of its batch or its rate than it had: what both come to now.

Another rate leaves the batch alone, whatever the number of workers is now; another batch is reckoned as that of a new
run, and the rate with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stormo.config.layout import Layout
from stormo.config.plan.rate import choose_rate, warmup_fraction
from stormo.config.schema import Effective, TrainConfig

_BATCH = {"batch_size", "global_batch_size"}
_RATE = {"base_lr", "base_batch_size", "lr_rule"}
_WARMUP = {"warmup_epochs", "warmup_from"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewed:
    """The settings with what the run began with as it would have begun by them, and the words for it."""

    config: TrainConfig
    before: Effective | None = None  # where batch or rate were reckoned anew
    rate_text: str | None = None  # instead of what would be said of the rate

    def batch_note(self, now: int) -> str:
        """What the batch was, where it is another now."""
        before = self.before
        return "" if before is None or before.global_batch_size == now else f"; {before.global_batch_size} before"

    def rate_note(self, now: float) -> str:
        """What the rate was, where it is another now."""
        before = self.before
        return "" if before is None or before.learning_rate == now else f"; {before.learning_rate:g} before"


def renew(config: TrainConfig, layout: Layout) -> Renewed:
    """Reckon anew what rests on changed settings; a new run and one that is told nothing new are left alone."""
    before, changed = config.resumed, {change.key: change for change in config.changed}
    if before is None or not changed:
        return Renewed(config=config)
    searches = config.batch.batch_size == "auto" and "batch_size" in changed  # the same batch in other passes
    if changed.keys() & (_BATCH - {"batch_size"} if searches else _BATCH):
        return Renewed(config=replace(config, resumed=None), before=before)
    if "accumulate" in changed:
        before = replace(before, batch_per_pass=None)  # passes as they are cut now, however large
    as_new = replace(config, resumed=None)
    if config.batch.batch_size == "auto" and before.batch_per_worker is not None:  # the word does not say it
        as_new = replace(as_new, batch=replace(config.batch, batch_size=before.batch_per_worker))
    elif searches:
        as_new = replace(as_new, batch=replace(config.batch, batch_size=changed["batch_size"].before))
    rate, rate_text = before.learning_rate, None
    if changed.keys() & _RATE:
        rate, rate_text = choose_rate(as_new, before.global_batch_size)
    start = before.warmup_start
    if changed.keys() & (_RATE | _WARMUP):
        num_workers = before.num_workers or layout.data_size * layout.devices_per_worker
        start = rate * warmup_fraction(as_new, num_workers, rate)
    now = replace(before, learning_rate=rate, warmup_start=start)
    return Renewed(config=replace(config, resumed=now), before=before, rate_text=rate_text)
