"""What is done about a divergence: back to the last good checkpoint with a lower rate, or an end that says what to try.

All workers take part; the main one looks into the run folder and speaks.
"""

from __future__ import annotations

from pathlib import Path

from stormo import checkpoint
from stormo.config.plan import Plan
from stormo.config.schema import TrainConfig
from stormo.distributed.world import World
from stormo.errors import counted
from stormo.telemetry.record import DivergenceNoticed, Notice
from stormo.telemetry.text import run_reference
from stormo.training.divergence import Diverged, Trend, diagnosis, remedies, wait_steps
from stormo.training.journal import Journal
from stormo.training.state import RunState

# Of what went wrong, too: the time was spent on those samples, and the number of starts is no matter of the weights.
_KEPT = ("num_resumes", "samples_trained", "train_time_s", "wait_s", "diverged_rate")


class Recovery:
    """Answers a divergence of one run."""

    def __init__(self, config: TrainConfig, plan: Plan, world: World, state: RunState, journal: Journal) -> None:
        self._config = config
        self._plan = plan
        self._world = world
        self._state = state
        self._journal = journal

    def prepare(self) -> None:
        """Save the beginning of a run, where its first steps may have to go back to."""
        if self._config.stop.on_divergence == "rollback" and not self._state.progress.step:
            self._journal.save(None)

    def roll_back(self, diverged: Diverged) -> bool:
        """Go back with a lower rate, where that is asked for and was not done too often; False: nothing is changed."""
        stop, progress, world = self._config.stop, self._state.progress, self._world
        # Bad inputs come back whatever the rate is.
        is_wanted = stop.on_divergence == "rollback" and not diverged.has_bad_inputs
        if not is_wanted or progress.num_rollbacks >= stop.max_rollbacks:
            return False
        self._journal.settle()  # a checkpoint that is being written may be the one
        good = self._last_good(diverged) if world.is_main else None
        shared = world.share_json(None if good is None else str(good.resolve()))
        if shared is None:
            return False
        progress.diverged_rate = self._diverged_rate(diverged)
        kept, diagnosed = {name: getattr(progress, name) for name in _KEPT}, self._diagnosis(diverged)
        num_rollbacks, rate_factor = progress.num_rollbacks + 1, progress.rate_factor * stop.rollback_factor
        if good is not None:
            self._journal.set_aside_later_than(good)
        self._state.take_up(world, good or Path(shared), self._config.run.seed)
        for name, value in kept.items():
            setattr(progress, name, value)
        progress.num_rollbacks, progress.rate_factor = num_rollbacks, rate_factor
        self._journal.keeper.rolled_back(progress.step)
        text = (
            f"{diagnosed} Going back to step {progress.step} with the learning rate × "
            f"{rate_factor:g} (rollback {num_rollbacks} of {stop.max_rollbacks})."
        )
        self._record(diverged, progress.step, text)
        self._journal.save(None)
        self._journal.settle()  # a run that is killed now must go on with the lower rate too
        return True

    def give_up(self, diverged: Diverged) -> None:
        """Tell what happened and what to try, with the command that goes on from the last good checkpoint."""
        self._journal.settle()
        if not self._world.is_main:
            return
        progress, good = self._state.progress, self._last_good(diverged)
        num_rollbacks, progress.diverged_rate = progress.num_rollbacks, self._diverged_rate(diverged)
        tried, flag = remedies(
            self._config,
            self._plan,
            diverged,
            has_own_optimizer=self._state.strategy.has_own_optimizer,
            diverged_rate=progress.diverged_rate,
            kept_factor=1.0 if good is None else progress.rate_factor,
        )
        sentences = [self._diagnosis(diverged)]
        if num_rollbacks:
            sentences.append(f"{counted(num_rollbacks, 'rollback')} did not help.")
        sentences += [f"Try {', '.join(tried)}.", self._way_on(good, flag)]
        self._record(diverged, None, " ".join(sentences))

    def _diverged_rate(self, diverged: Diverged) -> float | None:
        """The lowest rate after warm-up that the run has diverged with, this time's among them where it is to blame."""
        progress = self._state.progress
        rates = [] if progress.diverged_rate is None else [progress.diverged_rate]
        if not diverged.has_bad_inputs and diverged.kind != "validation":
            rates.append(self._plan.learning_rate * progress.rate_factor)
        return min(rates, default=None)

    def _way_on(self, good: Path | None, flag: str) -> str:
        folder = self._journal.folder
        self._journal.set_aside_later_than(good)  # so that a resume goes on from the good one
        if good is None:
            return "There is no good checkpoint from before: start a new run."
        command = f"stormo train --resume {run_reference(folder.name, str(folder.path))} {flag}".rstrip()
        step = checkpoint.read_manifest(good).step
        self._keep_tried(good)
        return f"The last good checkpoint is that of step {step}; go on from it with: {command}"

    def _keep_tried(self, good: Path) -> None:
        """Write rollbacks, their factor and the rate that was lost into a checkpoint from before: they stay with it."""
        names = ("num_rollbacks", "rate_factor", "diverged_rate")
        told = {name: getattr(self._state.progress, name) for name in names}
        state = checkpoint.read_state(good)
        if told.items() <= state["progress"].items():
            return
        state["progress"].update(told)
        try:
            checkpoint.replace_state(good, state)
        except checkpoint.CheckpointWriteError as error:  # which must not hide what went wrong before
            self._journal.record(Notice(kind="warning", text=str(error)))

    def _last_good(self, diverged: Diverged) -> Path | None:
        """The newest checkpoint of a calm loss, or the newest where none is known to have been."""
        # The weights after a step are those of the next step's loss: where that is a bad one, they are to blame.
        last_step = diverged.step - 1 if diverged.has_bad_inputs else diverged.onset_step - 2
        found = [one for one in checkpoint.find(self._journal.folder.checkpoints) if one.step <= last_step]
        for one in found:
            progress = checkpoint.read_state(one.path)["progress"]
            if Trend(**progress.get("trend", {})).is_calm(wait_steps(self._plan, progress["epoch"])):
                return one.path
        return found[0].path if found else None

    def _diagnosis(self, diverged: Diverged) -> str:
        has_own = self._state.strategy.has_own_optimizer
        factor = self._state.progress.rate_factor
        return diagnosis(self._config, self._plan, diverged, has_own_optimizer=has_own, rate_factor=factor)

    def _record(self, diverged: Diverged, rolled_back_to_step: int | None, text: str) -> None:
        self._journal.record(
            DivergenceNoticed(
                epoch=diverged.epoch,
                step=diverged.step,
                kind=diverged.kind,
                loss=diverged.loss,
                learning_rate=diverged.learning_rate,
                rolled_back_to_step=rolled_back_to_step,
                rate_factor=self._state.progress.rate_factor,
                text=text,
            )
        )
