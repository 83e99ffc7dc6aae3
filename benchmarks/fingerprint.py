"""What stormo computes, to the last bit, in many short runs on the CPU: for changes that must not change it.

    python -m benchmarks.fingerprint           # write the digests of this machine
    python -m benchmarks.fingerprint --check   # compare with them

A run is a command line of `stormo train` or a script with `stormo.World`, and is read by what it leaves behind. Its
three digests are those of the weights, as `stormo export` writes them; of the order of samples, over the run and of
each rank in its last epoch; and of all losses and metrics. Asynchronous servers are left out: no two such runs are
the same. Digests depend on processor and torch, so the file has a section for each kind of machine. --check ends with
1 when a run differs or fails, and with 2 where the file has no section for this machine.
"""

from __future__ import annotations

import argparse
import atexit
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.command import free_port, result_line, torchrun_variables
from benchmarks.fingerprint_cases import CASES, PROGRAMS, TRAIN

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("results") / "fingerprint.json"
IMAGES = ("~/.cache/stormo/fashion-mnist", "/usr/share/dataset-fashion-mnist")
PARTS = ("weights", "order", "metrics")
EPOCH = ("epoch", "step", "samples_seen", "train_loss", "learning_rate", "validation")
SUMMARY = (
    *("strategy", "mesh", "precision", "world_size", "global_batch_size", "micro_batch_size", "accumulate"),
    *("stopped_by", "epochs_run", "steps", "samples_seen", "samples_trained", "best_validation_loss"),
    *("num_resumes", "num_rollbacks", "noise_scale", "noise_scale_low", "noise_scale_high"),
)
_TIMEOUT_S = 300.0
_PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "safetensors.torch"]
_FOREIGN = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC", "STORMO_")


class FailedError(Exception):
    """A run has failed; the text is its command and the end of what it said."""


def digest(value: Any) -> str:
    """16 hexadecimal digits of what JSON can hold, floats to the last bit."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_weights(path: Path) -> list[Any]:
    """Names, types, shapes and bytes of a safetensors file, by name."""
    import torch
    from safetensors.torch import load_file

    tensors = sorted(load_file(path).items())
    return [
        (name, str(tensor.dtype), list(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes().hex())
        for name, tensor in tensors
    ]


def last_epoch(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The micro-batches after the last validation but one: the effect of earlier ones is discarded."""
    last = max((index for index, line in enumerate(lines) if line), default=-1)
    before = max((index for index, line in enumerate(lines[: last + 1]) if not line), default=-1)
    return list(lines[before + 1 : last + 1])


def fingerprint(folder: Path, run: Path | None) -> dict[str, str]:
    """The digests of a run from what its ranks have left in a folder, and from its run folder where it has one."""
    ranks = [last_epoch(_read_lines(path)) for path in sorted(folder.glob("rank-*"))]
    order: list[Any] = [[line["samples"] for line in rank] for rank in ranks]
    metrics: list[Any] = [[line["loss"] for line in rank] for rank in ranks]
    if run is None:
        metrics += _read_lines(folder / "metrics")
    else:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        epochs = [event for event in _read_lines(run / "events.jsonl") if event["event"] == "epoch_done"]
        order.append(summary["sample_order_sha256"])
        metrics += [[epoch[key] for key in EPOCH] for epoch in epochs]
        metrics.append([summary[key] for key in SUMMARY])
    return {"weights": digest(read_weights(folder / "weights")), "order": digest(order), "metrics": digest(metrics)}


def _read_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_case(stages: Sequence[str], folder: Path, images: Path | None) -> dict[str, str]:
    """Run the stages of a case one after the other; the digests of the last."""
    own, run = folder, folder / "run"
    for number, stage in enumerate(stages):
        workers, program, *arguments = shlex.split(stage.format(folder=folder))
        own = folder / f"stage-{number}"
        own.mkdir(parents=True)
        common = ["--runs-folder", str(folder), "--device", "cpu", "--no-energy", "--no-tensorboard", "--timeout", "60"]
        if program == "script":
            command = [PROGRAMS[program]]
        elif program == "resume":
            checkpoint = run / "checkpoints" / f"step-{int(arguments.pop(0)):08}"
            command = ["-m", "stormo", "train", "--resume", str(checkpoint), *common]
        else:
            command = ["-m", "stormo", "train", PROGRAMS[program], "--run-name", run.name, *common, *shlex.split(TRAIN)]
        if program in ("images", "text"):
            command += ["--task.data-folder", str(images if program == "images" else _write_text(folder / "text"))]
        _start([*command, *arguments], workers, own)
    if not run.exists():
        return fingerprint(own, None)
    _start(["-m", "stormo", "export", str(run), str(own / "weights")], "1", own)
    return fingerprint(own, run)


def _write_text(folder: Path) -> Path:
    folder.mkdir()
    for number in range(40):
        lines = (f"{index * index * 2654435761 % 1009:b} word {index % 7}" for index in range(number, number + 60))
        (folder / f"part-{number:02}.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _start(arguments: list[str], workers: str, folder: Path) -> None:
    """Run a program on `2` workers as by torchrun, on `4/2` as on two nodes, on `2!` as users start it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environ = {**kept, "OMP_NUM_THREADS": "1", "FINGERPRINT_FOLDER": str(folder)}
    if workers.endswith("!"):
        script = [] if arguments[0] == "-m" else ["-m", "stormo", "run"]
        command = [sys.executable, *script, *arguments, "--num-gpus", workers[:-1]]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
        codes, output = [done.returncode], done.stdout + done.stderr
    else:
        size, num_nodes = (int(number or 1) for number in workers.partition("/")[::2])
        port = free_port()
        ranks = [torchrun_variables(rank, size, port, num_nodes) for rank in range(size)]
        codes, output = _fork(arguments, [{**environ, **variables} for variables in ranks], folder)
    if any(codes):
        raise FailedError(f"{shlex.join(['python', *arguments])} on {workers} ended with {codes}:\n{output[-3000:]}")


def _fork(arguments: list[str], environs: Sequence[Mapping[str, str]], folder: Path) -> tuple[list[int], str]:
    context = multiprocessing.get_context("fork")  # of a process with a single thread
    outputs = [folder / f"output-{rank}" for rank in range(len(environs))]
    pairs = zip(environs, outputs, strict=True)
    processes = [context.Process(target=_become, args=(arguments, *pair)) for pair in pairs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(_TIMEOUT_S)
        process.kill()  # does nothing where it has ended
        process.join()
    return [process.exitcode or 0 for process in processes], "".join(path.read_text("utf-8") for path in outputs)


def _become(arguments: list[str], environ: Mapping[str, str], output: Path) -> None:
    """Make this process the program."""
    os.environ.clear()
    os.environ.update(environ)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv = arguments[1:] if arguments[0] == "-m" else arguments
    try:
        if arguments[0] == "-m":
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a process of multiprocessing ends without
        sys.stdout.flush()


def machine() -> str:
    """What digests depend on besides the code."""
    import torch

    release = torch.__version__.partition("+")[0]
    return f"{platform.machine()} torch {release} {torch.backends.cpu.get_cpu_capability()}"


def verdict(found: Mapping[str, str], known: Mapping[str, str] | None) -> str:
    """How a run compares with what the file knows of it."""
    if known is None:
        return "not in the file"
    differing = [part for part in PARTS if found[part] != known.get(part)]
    return f"differs: {', '.join(differing)}" if differing else "equal"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, two at a time; write the digests or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="only runs whose name contains it")
    parser.add_argument("--file", type=Path, default=FILE, help="of digests (default: benchmarks/results/…)")
    parser.add_argument("--data-folder", help="with the files of Fashion-MNIST; default: where stormo looks for them")
    options = parser.parse_args(arguments)
    sections = json.loads(options.file.read_text(encoding="utf-8")) if options.file.exists() else {}
    if options.check and machine() not in sections:
        print(f"{options.file} has no section for {machine()}: write one first, with the code before the change.")
        return 2
    kept = sections.get(machine(), {}).get("runs", {})
    known = {name: dict(zip(PARTS, digests.split(), strict=True)) for name, digests in kept.items()}
    names = [name for name in CASES if options.only in name]
    folders = map(Path, [options.data_folder] if options.data_folder else IMAGES)
    images = next((path for path in map(Path.expanduser, folders) if any(path.glob("train-images-idx3*"))), None)
    if images is None:
        print("Fashion-MNIST is not on this machine: its runs are left out.")
        names = [name for name in names if " images " not in CASES[name][0]]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when the server of processes imports it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as temporary, ProcessPoolExecutor(2, context) as pool:
        runs = [
            pool.submit(run_case, CASES[name], Path(temporary, str(index)), images) for index, name in enumerate(names)
        ]
        for name, run in zip(names, runs, strict=True):
            try:
                found[name] = run.result()
            except Exception as error:
                print(f"{name}: failed: {error}", flush=True)
                continue
            said = verdict(found[name], known.get(name)) if options.check else ""
            print(f"{name:32}", *found[name].values(), said, flush=True)
    num_equal = sum(verdict(one, known.get(name)) == "equal" for name, one in found.items())
    num_failed = len(names) - len(found)
    if not options.check and not num_failed:
        _write(options.file, sections, {**known, **found} if options.only else found)
    print(result_line({"runs": len(names), "equal": num_equal, "failed": num_failed}))
    return int(num_failed > 0 or (options.check and num_equal < len(names)))


def _write(path: Path, sections: dict[str, Any], runs: Mapping[str, Mapping[str, str]]) -> None:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = {name: " ".join(found[part] for part in PARTS) for name, found in runs.items()}
    sections[machine()] = {"commit": git.stdout.strip(), "date": today, "runs": lines}
    path.write_text(json.dumps(sections, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
