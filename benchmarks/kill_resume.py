"""A run that is killed again and again and resumed each time, against the same run left alone.

    python -m benchmarks.kill_resume [--kills 20] [--seed 0]

The real command trains a small network (dropout, batch norm, augmentation) on two workers with a checkpoint every
three steps. SIGKILL ends the agent, one worker or all of them at a random moment of start-up, training, saving or
validation; then the same command runs again, with `--resume`. The task itself writes down the samples of every step
(small_tasks.Witness): the chain of steps that leads to the final weights must hold every sample once an epoch.
After each kill, the checkpoints that follow must have the digests of the undisturbed run at the same steps, and no
process may be left behind.

    python -m benchmarks.kill_resume --world-sizes 2,1,3

resumes on other worker counts in turn, in float64, without dropout and with synchronised batch norm: the same samples
in the same order, and weights that agree to rounding.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.attempts import (
    CHECKPOINT_EVERY,
    GLOBAL_BATCH_SIZE,
    MOMENTS,
    NUM_SAMPLES,
    STEPS_PER_EPOCH,
    Attempt,
    Kill,
    Run,
)
from benchmarks.command import aligned, data_folder, numbers, relative_difference, result_line, small_task
from benchmarks.lineage import lost_and_repeated, read_attempt, trace

ROUNDING = 1e-9  # float64 over all steps on changing worker counts


def flags(options: argparse.Namespace, epochs: int) -> list[str]:
    """The settings of the run."""
    arguments = [
        small_task("Witness"),
        *("--task.train-samples", str(NUM_SAMPLES), "--task.validation-samples", "150", "--task.augment"),
        *("--validation-batch-size", "10", "--global-batch-size", str(GLOBAL_BATCH_SIZE), "--epochs", str(epochs)),
        *("--base-lr", "0.02", "--nesterov", "--weight-decay", "0.0005", "--warmup-epochs", "1"),
        *("--warmup-from", "0.1", "--decay", "cosine", "--target-accuracy", "1.1", "--device", "cpu"),
        *("--checkpoint-every", str(CHECKPOINT_EVERY), "--seed", str(options.seed), "--deterministic"),
    ]
    if options.world_sizes:
        arguments += ["--precision", "fp64", "--task.dropout", "0", "--sync-batch-norm"]
    else:
        arguments += ["--task.dropout", "0.1"]
    return [*arguments, "--task.data-folder", options.data_folder]


def run_undisturbed(run: Run, num_workers: int) -> None:
    """Train to the end in one attempt, and learn how long things take here."""
    attempt = Attempt(run, num_workers)
    run.first_step_s = attempt.wait_for_first_step()
    attempt.wait_to_end()
    saves = [event["save_time_s"] for event in run.events() if event["event"] == "checkpoint_saved"]
    run.save_s = sorted(saves)[len(saves) // 2]


def run_killed(run: Run, num_kills: int, world_sizes: Sequence[int], draw: random.Random) -> list[Kill]:
    """Kill and resume, then train to the end."""
    kills: list[Kill] = []
    while len(kills) < num_kills:
        num_workers = world_sizes[len(kills) % len(world_sizes)]
        attempt = Attempt(run, num_workers)
        moment = draw.choice(MOMENTS)
        targets = ["agent", "all", *(f"rank {rank}" for rank in range(num_workers))] if num_workers > 1 else ["all"]
        target = draw.choice(targets)
        if not attempt.wait_for(moment, draw):
            attempt.wait_to_end()
            print(f"the run ended before kill {len(kills) + 1}", file=sys.stderr)
            return kills
        kills.append(attempt.kill(target, moment))
        one = kills[-1]
        print(
            f"kill {len(kills)} of {num_kills}: {one.target} during {one.moment} on {num_workers} workers, "
            f"{one.num_steps} steps into the attempt; all gone after {one.gone_after_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    Attempt(run, world_sizes[len(kills) % len(world_sizes)]).wait_to_end()
    return kills


def equal_after(run: Run, clean: Run, kill: int) -> bool:
    """Whether the first checkpoints after a kill have the digests of the undisturbed run at the same steps."""
    expected = clean.saved(0)
    for attempt in range(kill + 1, len(run.num_events)):
        saved = run.saved(attempt)
        if saved:
            return all(expected.get(step) == digest for step, digest in saved.items())
    return False


def final_difference(run: Run, clean: Run) -> float:
    """The largest relative difference of the final weights and running statistics."""
    from stormo import checkpoint

    last = [checkpoint.load(checkpoint.find(one.path / "checkpoints")[0].path).model for one in (run, clean)]
    return relative_difference(*last)


def compare(
    run: Run, clean: Run, kills: Sequence[Kill], epochs: int, *, same_world_size: bool
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a table of the kills."""
    from stormo.telemetry.folder import RunFolder, read_summary

    chains = []
    for one in (run, clean):
        attempts = [read_attempt(one.log_folder(number), number) for number in range(len(one.num_events))]
        chains.append(trace(attempts))
    lost, repeated = lost_and_repeated(chains[0], NUM_SAMPLES, STEPS_PER_EPOCH, epochs)
    digests = [(read_summary(RunFolder(one.path)) or {}).get("weights_sha256") for one in (run, clean)]
    equal = [equal_after(run, clean, index) for index in range(len(kills))]
    rows = [["kill", "target", "moment", "steps in attempt", "save cut off", "all gone after", "digests after it"]]
    rows += [
        [
            str(index),
            kill.target,
            kill.moment,
            str(kill.num_steps),
            "yes" if kill.cut_a_save else "",
            f"{kill.gone_after_s:.1f} s",
            ("equal" if equal[index - 1] else "differ") if same_world_size else "not compared",
        ]
        for index, kill in enumerate(kills, start=1)
    ]
    figures: dict[str, Any] = {"kills": len(kills)}
    if same_world_size:
        figures["equal_digests"] = sum(equal)
    figures |= {
        "samples_lost": lost,
        "samples_repeated": repeated,
        "same_order": [step.samples for step in chains[0]] == [step.samples for step in chains[1]],
        "orphans": sum(kill.num_orphans for kill in kills),
        "saves_cut_off": sum(kill.cut_a_save for kill in kills),
    }
    if same_world_size:
        figures["final_digest_equal"] = digests[0] is not None and digests[0] == digests[1]
    else:
        figures["max_relative_difference"] = final_difference(run, clean)
    return figures, aligned(rows)


def is_kept(figures: dict[str, Any], num_kills: int, *, same_world_size: bool) -> bool:
    """Whether every promise was kept."""
    if figures["kills"] != num_kills or figures["samples_lost"] or figures["samples_repeated"] or figures["orphans"]:
        return False
    if not figures["same_order"]:
        return False
    if same_world_size:
        return figures["equal_digests"] == num_kills and bool(figures["final_digest_equal"])
    return bool(figures["max_relative_difference"] <= ROUNDING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice, once disturbed, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the run, and of what is killed when")
    parser.add_argument("--world-sizes", type=numbers, default=(), help="resume on these worker counts in turn")
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo keeps them")
    options = parser.parse_args(arguments)
    options.data_folder = data_folder(options.data_folder)
    epochs = options.kills + 4  # an attempt is killed within about an epoch of its first step
    world_sizes = options.world_sizes or (2,)
    draw = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="stormo-kill-resume-"))
    clean = Run(folder=folder, name="undisturbed", flags=flags(options, epochs))
    print(f"training {epochs} epochs = {epochs * STEPS_PER_EPOCH} steps undisturbed ...", file=sys.stderr, flush=True)
    run_undisturbed(clean, world_sizes[0])
    run = Run(folder=folder, name="killed", flags=clean.flags, first_step_s=clean.first_step_s, save_s=clean.save_s)
    kills = run_killed(run, options.kills, world_sizes, draw)
    same_world_size = not options.world_sizes
    figures, table = compare(run, clean, kills, epochs, same_world_size=same_world_size)
    kept = is_kept(figures, options.kills, same_world_size=same_world_size)
    print("\n".join(table))
    if kept:
        shutil.rmtree(folder)
    else:
        print(f"everything is kept in {folder}")
    print(result_line(figures))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
