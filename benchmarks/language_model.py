"""Tokens per second and MFU of the GPT on one GPU, and beside it, in the same run, a plain loop over the same model.

    python -m benchmarks.language_model [--preset 125m] [--batch-size 64] [--steps 60]

stormo's side is the real command `stormo train language-model` in bf16 with torch.compile; its figures are those of
its second epoch, when everything is warm. The plain side is what a user would write: autocast, torch.compile, fused
AdamW, clipped gradients, batches sliced from a tensor on the GPU. Without a GPU both run the tiny preset in fp32, not
compiled, and there is no MFU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import result_line, run_to_end, train_command
from stormo.system.hardware import peaks_of, visible_gpus
from stormo.tasks.language_model import LanguageModel, LanguageModelOptions

_WARM_STEPS = 10


def run_stormo(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The last epoch of a run of the real command, and its summary."""
    block = LanguageModel(LanguageModelOptions(preset=options.preset)).block
    arguments = ["language-model", "--task.preset", options.preset, "--num-gpus", 1, "--batch-size", options.batch_size]
    train_bytes = options.steps * options.batch_size * block + 1
    arguments += ["--task.train-bytes", train_bytes, "--task.validation-bytes", 2**16]
    arguments += ["--epochs", 2, "--checkpoint-every", 0, "--run-name", "benchmark", "--runs-folder", folder]
    arguments += ["--precision", "bf16", "--compile"] if options.is_gpu else ["--precision", "fp32"]
    run_to_end(train_command(*arguments))
    events = [json.loads(line) for line in (folder / "benchmark" / "events.jsonl").read_text().splitlines()]
    epoch: dict[str, Any] = [event for event in events if event["event"] == "epoch_done"][-1]
    return epoch


def run_plain(options: argparse.Namespace) -> tuple[float, int]:
    """Tokens per second of a hand-written loop, and its peak memory in bytes (0 without a GPU)."""
    device = torch.device("cuda" if options.is_gpu else "cpu")
    torch.manual_seed(0)
    num_steps = _WARM_STEPS + options.steps
    task = LanguageModel(LanguageModelOptions(preset=options.preset, train_bytes=2**24))
    windows = task.train_data().tensors[0].to(device)
    model: Any = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    run = torch.compile(model) if options.is_gpu else model
    times_s = []
    for step in range(num_steps):
        if options.is_gpu and step % _WARM_STEPS == 0:
            torch.cuda.synchronize()
        if step % _WARM_STEPS == 0:
            times_s.append(time.perf_counter())
        first = step * options.batch_size % (len(windows) - options.batch_size + 1)
        tokens = windows[first : first + options.batch_size].long()
        with torch.autocast("cuda", torch.bfloat16) if options.is_gpu else nullcontext():
            scores = run(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    # The first interval, in which everything is compiled, is left out; the median of the others is shown.
    lengths = [later - earlier for earlier, later in itertools.pairwise(times_s[1:])]
    tokens_per_s = _WARM_STEPS * options.batch_size * task.block / statistics.median(lengths)
    return tokens_per_s, torch.cuda.max_memory_allocated() if options.is_gpu else 0


def main() -> None:
    """Run both and print the figures."""
    gpus = visible_gpus()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="125m" if gpus else "tiny")
    parser.add_argument("--batch-size", type=int, default=64 if gpus else 8, help="windows in a step")
    parser.add_argument("--steps", type=int, default=60 if gpus else 30, help="steps of an epoch; at least 30")
    options = parser.parse_args()
    if options.steps < 3 * _WARM_STEPS:
        parser.error(f"--steps {options.steps} is too few for a median; set at least {3 * _WARM_STEPS}")
    options.is_gpu = bool(gpus)
    with tempfile.TemporaryDirectory() as folder:
        ours = run_stormo(options, Path(folder))
    if not gpus:
        torch.set_num_threads(1)  # as many as the command has had
    plain_tokens_per_s, plain_memory_bytes = run_plain(options)
    figures: dict[str, Any] = {"tokens_per_s": ours["units_per_s"]}
    if ours["mfu"] is not None:
        figures["mfu"] = ours["mfu"]
    figures["plain_tokens_per_s"] = plain_tokens_per_s
    peaks = peaks_of(gpus[0]) if gpus else None
    if peaks:
        facts = LanguageModel(LanguageModelOptions(preset=options.preset)).facts()
        assert facts.flops_per_sample is not None
        flops_per_token = facts.flops_per_sample / facts.units_per_sample
        figures["plain_mfu"] = plain_tokens_per_s * flops_per_token / (peaks[0] * 1e12)
    figures["peak_memory_bytes"] = ours["peak_memory_bytes"]
    if plain_memory_bytes:
        figures["plain_peak_memory_bytes"] = plain_memory_bytes
    figures["loss"] = ours["train_loss"]
    print(f"{options.preset}, batch {options.batch_size}, on {gpus[0].name if gpus else 'CPU'}")
    print(result_line(figures))


if __name__ == "__main__":
    main()
