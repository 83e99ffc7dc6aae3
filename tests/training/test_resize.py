"""A run that resumes with other workers, in the middle of an epoch: its batch is kept or scaled, its order kept."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from stormo.cli import main
from stormo.config import options
from stormo.config.layout import resolve_layout
from stormo.config.plan import Facts, Plan, resolve, with_micro_batches
from stormo.config.schema import ResolvedBatch
from stormo.data.order import epoch_order
from tests import programs

TASK = str(Path(__file__).parent.with_name("tiny_task.py"))
# 301 samples: 19 steps of 16, 38 of 8.
_FLAGS = "--device cpu --precision fp64 --deterministic --task.num-train 301 --task.dropout 0 --no-task.norm "
_FLAGS += "--target-accuracy 2 --epochs 2 --warmup-epochs 1.5 --decay cosine --no-tensorboard --batch-size 8 "
_FLAGS += "--checkpoint-every 7 --keep-checkpoints 99"
FACTS = Facts(num_train=60_000, num_validation=10_000, train_bytes=60_000 * 792)
BEGAN = ResolvedBatch(
    global_batch_size=64, learning_rate=0.02, warmup_start=0.01, num_workers=2, micro_batch_size=32
)  # as 2 workers with --batch-size 32 and --base-lr 0.01 begin


def plan_of(num_workers: int, began: ResolvedBatch = BEGAN, **flags: Any) -> Plan:
    config = replace(options.make_config({"num_gpus": num_workers, **flags}, None), resumed=began)
    return resolve(config, resolve_layout(config, ()), FACTS)


def said(plan: Plan, label: str) -> str:
    return dict(plan.explanation)[label]


@pytest.mark.parametrize(
    ("num_workers", "accumulate", "text"),
    [
        (1, 2, "64 as before = 32 per worker × 1 worker × 2 accumulation; it began with 2 workers"),
        (2, 1, "64 as before = 32 per worker × 2 workers × 1 accumulation"),
        (3, 1, "64 as before = 21 to 22 per worker × 3 workers × 1 accumulation; it began with 2 workers"),
    ],
)
def test_a_batch_that_is_kept_is_cut_into_micro_batches_no_larger_than_at_the_start(
    num_workers: int, accumulate: int, text: str
) -> None:
    plan = plan_of(num_workers)
    assert (plan.global_batch_size, plan.learning_rate, plan.accumulate) == (64, 0.02, accumulate)
    assert said(plan, "global batch") == text
    assert plan.initial == BEGAN


@pytest.mark.parametrize(
    ("rule", "rate", "text"),
    [
        ("linear", 0.03, "0.03 = 0.02 × (96 / 64) (linear)"),
        ("sqrt", 0.02 * 1.5**0.5, "0.0244949 = 0.02 × √(96 / 64) (sqrt)"),
        ("none", 0.02, "0.02 as at the start (--lr-rule none)"),
    ],
)
def test_a_scaled_batch_follows_the_workers_and_the_learning_rate_its_rule(rule: str, rate: float, text: str) -> None:
    plan = plan_of(3, on_resize="scale", lr_rule=rule)
    assert (plan.global_batch_size, plan.warmup_start, plan.accumulate) == (96, 0.01, 1)
    assert plan.learning_rate == pytest.approx(rate, rel=1e-15)
    words = "96 = 64 × 3/2: 3 workers now, 2 at the start (--on-resize scale)"
    assert said(plan, "global batch") == words
    assert said(plan, "learning rate").startswith(text + "; warm-up from 0.01 over 5 epochs")
    assert plan.initial == BEGAN  # from which the next change is reckoned


def test_the_micro_batches_that_were_found_are_named_for_a_scaled_batch() -> None:
    before = plan_of(3, on_resize="scale", batch_size="auto")
    text = "96 = 64 × 3/2: 3 workers now, 2 at the start (--on-resize scale)"
    config = options.make_config({"num_gpus": 3, "batch_size": "auto"}, None)
    plan = with_micro_batches(config, before, 2, "why", None)
    assert said(plan, "global batch") == f"{text} = 2 micro-batches of 16 (auto: why) × 3 workers"


@pytest.mark.parametrize(
    ("num_workers", "warmup_from", "start"),
    [(1, None, 0.01), (1, 1.0, 0.01), (8, 0.5, 0.04), (8, None, 0.015)],
)
def test_warm_up_never_starts_above_a_scaled_learning_rate(
    num_workers: int, warmup_from: float | None, start: float
) -> None:
    began = replace(BEGAN, warmup_start=0.015 if warmup_from is None else 0.02 * warmup_from)
    plan = plan_of(num_workers, began, on_resize="scale", warmup_from=warmup_from)
    assert plan.learning_rate == pytest.approx(0.01 * num_workers)
    assert plan.warmup_start == pytest.approx(start)


def test_a_run_resumes_with_fewer_workers_from_the_middle_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["-m", "stormo", "train", TASK, *_FLAGS.split(), "--run-name", "kept"]
    assert programs.run(words, tmp_path, 2).returncode == 0
    whole, weights = _summary("kept"), _weights("kept")
    shutil.copytree("runs/kept", "runs/scaled")

    _resume("kept")
    kept = _summary("kept")
    assert (kept["steps"], kept["sample_order_sha256"]) == (whole["steps"], whole["sample_order_sha256"])
    for name, tensor in _weights("kept").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-11, atol=1e-13)

    _resume("scaled", "--on-resize", "scale", "--checkpoint-every", "0.5ep")
    assert "global batch   8 = 16 × 1/2: 1 worker now, 2 at the start" in capsys.readouterr().out
    scaled = _summary("scaled")
    chain, num_steps = b"", 0
    for epoch in (1, 2):
        samples = epoch_order(301, 0, epoch).long()  # as the digest of a run counts them
        sizes = [16] * 7 + [8] * 23 + [5] if epoch == 1 else [8] * 37 + [5]
        assert sum(sizes) == 301
        for batch in samples.split(sizes):
            chain, num_steps = _linked(chain, batch), num_steps + 1
    assert (scaled["steps"], scaled["sample_order_sha256"]) == (num_steps, chain.hex())
    saved = sorted(int(path.name.removeprefix("step-")) for path in Path("runs/scaled/checkpoints").glob("step-*"))
    assert saved == [7, 12, 31, 50, 69]  # 19 and 0 steps before the end of each epoch


def _linked(chain: bytes, batch: torch.Tensor) -> bytes:
    link = hashlib.sha256(chain)
    link.update(batch.numpy().data)
    return link.digest()


def _resume(name: str, *flags: str) -> None:
    torch.set_default_dtype(torch.float32)  # as in a process of its own
    found = f"runs/{name}/checkpoints/step-00000007"
    assert main(["train", "--resume", found, "--num-gpus", "1", "--device", "cpu", *flags]) == 0


def _summary(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("runs", name, "summary.json").read_text())
    return content


def _weights(name: str) -> dict[str, torch.Tensor]:
    newest = max(Path("runs", name, "checkpoints").glob("step-*"))
    return safetensors.torch.load_file(newest / "model.safetensors")
