"""The runs of `benchmarks.fingerprint`: workers, program and words of each, for runs in several stages one a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_TASK = _HERE / "fingerprint_task.py"
PROGRAMS = {
    **{name.lower(): f"{_TASK}:{name}" for name in ("Points", "Summed", "Whole")},
    "images": "fashion-mnist",
    "text": "language-model",
    "script": str(_HERE / "fingerprint_script.py"),
}
# Of every training; later words win. The last batch of 3 leaves one of 4 workers without a sample.
TRAIN = """--deterministic --checkpoint-every 0 --epochs 2 --global-batch-size 14 --validation-batch-size 10
    --base-lr 0.05 --warmup-epochs 0.5 --warmup-from 0.2 --target-accuracy 1.1"""

_EVEN = "--task.train 34 --global-batch-size 16"
_NORM = "--task.norm --task.train 46"
_IMAGES = "images --task.width 0.2 --task.train-samples 45 --task.validation-samples 30"
_TEXT = "text --task.block 16 --task.train-bytes 600 --task.validation-bytes 400 --global-batch-size 12"
_SAVING = "--epochs 3 --checkpoint-every 2 --keep-checkpoints 9"
_KEPT = "script --checkpoints {folder}/saved"

_ONE_STAGE = {
    # Kinds of data and of losses.
    "seed 0": "1 points",
    "seed 3": "1 points --seed 3",
    "one, jitter, dropout": "1 points --task.jitter 0.1 --task.dropout 0.2",
    "one, 3 passes": "1 points --accumulate 3",
    "map, one": "1 points --task.data map --loader-workers 0",
    "map, 2 reading processes": "2 points --task.data map --loader-workers 2",
    "map, 3": "3 points --task.data map --loader-workers 0",
    "stream, one": "1 points --task.data stream --loader-workers 0",
    "stream, 2, a reading process": "2 points --task.data stream",
    "stream without a length, 3": "3 points --task.data endless --epoch-samples 31 --loader-workers 0",
    "counts, 2, 2 passes": "2 points --task.counts --accumulate 2",
    "counts, fsdp, 3": "3 points --task.counts --strategy fsdp",
    "sum, 2": "2 summed --accumulate 2",
    "loss of the batch, 2": "2 whole",
    "own optimizer, one": "1 points --task.own-optimizer",
    "own optimizer, zero2, 2": "2 points --task.own-optimizer --strategy zero2",
    # Strategies.
    "ddp, 2": "2 points --strategy ddp --momentum 0.8 --nesterov --weight-decay 0.01 --clip-norm 0.5",
    "ddp, 2, started by stormo": "2! points --strategy ddp",
    "ddp, 3, 2 passes": "3 points --accumulate 2",
    "ddp, 4": "4 points --batch-size 3 --global-batch-size 12 --no-noise-scale",
    "local, 2": "2 points --strategy local --average-every 3",
    "local, 3, outer step": "3 points --strategy local --average-every 2 --outer-lr 0.7 --outer-momentum 0.9",
    "server, 2": "2 points --strategy server",
    "server, 3, 2 servers": "3 points --strategy server --servers 2 --optimizer adamw --base-lr 0.003",
    "zero1, 2, 2 passes": "2 points --strategy zero1 --accumulate 2 --clip-norm 0.5",
    "zero1, 3, adamw": "3 points --strategy zero1 --optimizer adamw --base-lr 0.003",
    "zero2, 2, offload": "2 points --strategy zero2 --offload --clip-norm 0.5",
    "zero2, 3, lamb": "3 points --strategy zero2 --optimizer lamb --base-lr 0.01",
    "fsdp, 2, clipped": "2 points --strategy fsdp --clip-norm 0.5 --checkpoint-activations",
    "fsdp, 2, offload, 2 passes": "2 points --strategy fsdp --offload --accumulate 2",
    "fsdp, 3, lars": "3 points --strategy fsdp --optimizer lars --base-lr 5",
    "hsdp, 4 on 2 nodes": "4/2 points --strategy hsdp --optimizer novograd --base-lr 0.01",
    "tensor, 2, dropout": "2 points --strategy tensor --task.dropout 0.1 --clip-norm 0.5",
    "tensor, 4, lars": "4 points --strategy tensor --optimizer lars --base-lr 5",
    "hybrid, 2": "2 points --strategy hybrid --clip-norm 0.5",
    "naive, 2": f"2 points {_EVEN} --strategy naive",
    "pipeline, gpipe, 2": f"2 points {_EVEN} --task.stages 2 --strategy pipeline --schedule gpipe --task.dropout 0.1",
    "pipeline, 1f1b, 3": f"3 points {_EVEN} --task.stages 3 --strategy pipeline --clip-norm 0.5 --micro-batches 4",
    "pipeline, interleaved, 2": f"2 points {_EVEN} --task.stages 4 --strategy pipeline --schedule interleaved",
    "pipeline, zero-bubble, 2": f"2 points {_EVEN} --task.stages 4 --strategy pipeline --schedule zero-bubble",
    "mesh, replicate × shard, zero 1": "4 points --mesh replicate=2,shard=2 --zero 1",
    "mesh, replicate × shard, zero 3": "4 points --mesh replicate=2,shard=2 --clip-norm 0.5",
    "mesh, shard × tensor, zero 2": "4 points --mesh shard=2,tensor=2 --zero 2 --optimizer lamb --base-lr 0.01",
    "mesh, pipeline × shard": f"4 points {_EVEN} --task.stages 2 --mesh pipeline=2,shard=2",
    "mesh, pipeline × tensor": f"4 points {_EVEN} --task.stages 2 --mesh pipeline=2,tensor=2",
    # Optimizers, rates, number formats, what travels.
    "sgd, step decay": "2 points --decay step --decay-every 0.5 --decay-factor 0.5 --lr-rule sqrt --base-batch-size 7",
    "adamw, cosine": "2 points --optimizer adamw --base-lr 0.003 --beta2 0.95 --weight-decay 0.1 --decay cosine",
    "lars, linear decay": "2 points --optimizer lars --base-lr 5 --nesterov --decay linear --weight-decay 0.01",
    "larc": "2 points --optimizer larc --base-lr 0.1 --trust-coefficient 0.01",
    "lamb": "2 points --optimizer lamb --base-lr 0.01 --clip-norm 1 --eps 1e-5",
    "novograd": "2 points --optimizer novograd --base-lr 0.01 --grad-averaging --weight-decay 0.01",
    "bf16": "2 points --precision bf16",
    "bf16, fsdp": "2 points --precision bf16 --strategy fsdp",
    "fp16": "2 points --precision fp16 --clip-norm 0.5",
    "fp64": "3 points --precision fp64",
    "compressed, bf16": "2 points --compress bf16",
    "compressed, fp16": "3 points --compress fp16",
    "compressed, powersgd": "2 points --compress powersgd --compress-rank 2 --epochs 4",
    # Batches, batch norm, noise, ends.
    "growing batch": "2 points --epochs 3 --grow-batch 1:2x,2:2x --max-batch-size 10",
    "batch norm, 2": f"2 points {_NORM}",
    "synchronised batch norm, 3": f"3 points {_NORM} --sync-batch-norm",
    "ghost batch norm, 2": f"2 points {_NORM} --task.train 48 --global-batch-size 16 --ghost-batch-size 4",
    "gradient noise": "2 points --gradient-noise 0.01 --gradient-noise-decay 0.6",
    "gradient noise of a batch": "2 points --gradient-noise-batch 4",
    "rollback": "1 points --checkpoint-every 2 --on-divergence rollback --base-lr 1e9 --rollback-factor 1e-9",
    "target": "1 points --epochs 9 --target-accuracy 0.5 --patience 2",
    # The reference jobs.
    "images, one, augmented": f"1 {_IMAGES} --task.augment --task.label-smoothing 0.1 --task.dropout 0.1",
    "images, 2, synchronised": f"2 {_IMAGES} --sync-batch-norm --optimizer lars --base-lr 5",
    "images, 2, bf16, ghost": f"2 {_IMAGES} --global-batch-size 15 --ghost-batch-size 4 --precision bf16",
    "images, hybrid, 2": f"2 {_IMAGES} --strategy hybrid --loader streamed --loader-workers 0",
    "text, one": f"1 {_TEXT}",
    "text, fsdp, 2, dropout": f"2 {_TEXT} --strategy fsdp --task.dropout 0.1",
    "text, tensor, 2": f"2 {_TEXT} --strategy tensor",
    "text, pipeline, 2": f"2 {_TEXT} --strategy pipeline --micro-batches 2 --clip-norm 1e9",
    # Scripts.
    "script, one": "1 script --dropout 0.1",
    "script, 2": "2 script --dropout 0.1",
    "script, 2, started by stormo": "2! script",
    "script, 3, 2 passes": "3 script --data set --accumulate 2",
    "script, one, a stream": "1 script --data stream",
    "script, 2, a stream": "2 script --data stream --compress bf16",
    "script, 2, parts of a stream": "2 script --data sharded --reduction count --own-norm",
    "script, 2, sums": "2 script --reduction sum --data set",
    "script, 2, two losses": "2 script --reduction two",
}
CASES: Mapping[str, Sequence[str]] = {
    **{name: (stage,) for name, stage in _ONE_STAGE.items()},
    # Stopped within the first or second epoch, and gone on with.
    "resumed, one": (f"1 points {_SAVING} --task.dropout 0.1", "1 resume 2"),
    "resumed, ddp, 2 → 2": (f"2 points {_SAVING} {_NORM} --task.dropout 0.1", "2 resume 2"),
    "resumed, ddp, 2 → 3": (f"2 points {_SAVING} --momentum 0.9", "3 resume 6"),
    "resumed, ddp, 2 → 1, scaled": (f"2 points {_SAVING} --on-resize scale", "1 resume 2"),
    "resumed, stream, 2 → 1": (f"2 points {_SAVING} --task.data stream --loader-workers 0", "1 resume 2"),
    "resumed, local, 2 → 2": (f"2 points {_SAVING} --strategy local --average-every 3", "2 resume 2"),
    "resumed, local → ddp, 3": (f"2 points {_SAVING} --strategy local --average-every 3", "3 resume 2 --strategy ddp"),
    "resumed, zero2 → mesh": (
        f"2 points {_SAVING} --strategy zero2 --optimizer adamw --base-lr 0.003",
        "4 resume 2 --strategy auto --mesh shard=2,tensor=2",
    ),
    "resumed, fsdp, 3 → one": (f"3 points {_SAVING} --strategy fsdp --optimizer lamb", "1 resume 6 --strategy auto"),
    "resumed, fsdp, 2 → 2": (f"2 points {_SAVING} --strategy fsdp --precision fp16 --async-checkpoint", "2 resume 2"),
    "resumed, pipeline, 2 → 2": (
        f"2 points {_SAVING} {_EVEN} --task.stages 2 --strategy pipeline --task.dropout 0.1",
        "2 resume 2",
    ),
    "resumed, server, 3 → 3": (f"3 points {_SAVING} --strategy server", "3 resume 2"),
    "resumed, powersgd, 2 → 2": (f"2 points {_SAVING} --compress powersgd --compress-rank 1", "2 resume 6"),
    "resumed, growing batch": (f"2 points {_SAVING} --grow-batch 1:2x", "2 resume 2"),
    "resumed script, one": (f"1 {_KEPT} --stop-after 3 --dropout 0.1", f"1 {_KEPT} --dropout 0.1"),
    "resumed script, 2 → 2": (
        f"2 {_KEPT} --stop-after 6 --data set --dropout 0.1",
        f"2 {_KEPT} --data set --dropout 0.1",
    ),
    "resumed script, 2 → 3": (f"2 {_KEPT} --stop-after 6 --data set", f"3 {_KEPT} --data set"),
    "resumed script, a stream, 2 → 1": (f"2 {_KEPT} --stop-after 2 --data stream", f"1 {_KEPT} --data stream"),
}
