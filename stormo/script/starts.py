"""What a script draws over all its starts: each of its nodes writes a file beside the checkpoints, as a `Task`'s do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stormo.energy import read_bill
from stormo.energy.keeper import NoKeeper
from stormo.energy.summary import SMALLEST_SHOWN_SHARE, amount_text
from stormo.errors import counted
from stormo.training.measuring import AnyKeeper


class Starts:
    """This start, in the folder that it first saves to; whatever it was before, what it draws is counted there."""

    def __init__(self, keeper: AnyKeeper, node_id: int | str) -> None:
        self._keeper = keeper
        self._node_id = node_id
        self._loaded: dict[Path, int] = {}  # the step that was loaded from a folder
        self._folder: Path | None = None
        self._has_waited = False  # for a save to a folder that was loaded from
        self._is_training = False

    def loaded(self, folder: Path, step: int) -> None:
        """A checkpoint of that step was loaded."""
        self._loaded[folder.resolve()] = step

    def advance(self, step: int) -> None:
        """So many steps are done."""
        if self._is_training:
            self._keeper.advance(step)
        else:
            self._keeper.enter("training", step)
            self._is_training = True

    @contextmanager
    def saving(self, folder: Path, step: int) -> Iterator[None]:
        """While a checkpoint is written."""
        self._keeper.enter("checkpoint", step)
        try:
            yield
            self._attach(folder)
        finally:
            self._keeper.enter("training", step)

    def _attach(self, folder: Path) -> None:
        # A node that does not see the folder writes nothing, rather than making one that nobody looks into.
        if self._folder is not None or not folder.is_dir():
            return
        step = self._loaded.get(folder.resolve())
        # A script may keep its best and its last checkpoints apart: what it goes on from is where it is counted.
        if self._loaded and step is None and not self._has_waited:
            self._has_waited = True
            return
        self._folder = folder.resolve()
        self._keeper.attach(self._folder / "nodes" / f"{self._node_id}.jsonl", step, step or 0)

    def close(self) -> None:
        """End this node's file."""
        self._keeper.close()

    def sentence(self) -> str | None:
        """What all starts drew, once all nodes have ended their files; None where this is the first one."""
        if self._folder is None:
            return None
        bill = read_bill(self._folder)
        if bill.total_j is None or len(bill.attempts) < 2:
            return None
        drawn = amount_text(bill.total_j, bill.total_error_j, bill.kinds_j)
        text = f"Over all {len(bill.attempts)} starts: {drawn}"
        share = bill.parts_j.get("recomputed", 0.0) / bill.total_j if bill.total_j else 0.0
        if share >= SMALLEST_SHOWN_SHARE:
            text += f", {100 * share:.0f} % of it for work that had to be done again"
        if num_absent := sum(attempt.num_nodes - len(attempt.node_ids) for attempt in bill.attempts):
            text += f", without {counted(num_absent, 'file')} that a node did not write"
        if self._keeper.failure is not None:
            text += f"; what this start drew is not all in it: {self._keeper.failure}"
        return f"{text}."


def no_starts() -> Starts:
    """Where nothing is measured."""
    return Starts(NoKeeper(), 0)
