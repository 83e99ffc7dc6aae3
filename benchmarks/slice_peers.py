"""One rank of a training without stormo: the other sides of the stage `speed` of `benchmarks.slices`.

Started once for each device, with torchrun's variables. The network is that of stormo's reference job, in bf16 and
channels_last on a GPU. `plain` is what a good user writes: DDP with gradients as views of its buckets, a fused
optimizer, the data on the device. `fsdp` is the same with FSDP2, block by block. `accelerate` and `lightning` have the
defaults of these packages and a DataLoader. Rank 0 prints the images per second of the last epoch as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

PACKAGES = {"accelerate": ("accelerate",), "lightning": ("lightning.pytorch", "pytorch_lightning")}
FIGURE = "images_per_s"
EPOCHS = 2
_LOADER_PROCESSES = 3
_LEARNING_RATE, _MOMENTUM = 0.01, 0.9


def package_of(side: str) -> str | None:
    """The module of a side that is installed; None where none is."""
    for name in PACKAGES[side]:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return name
    return None


class Job:
    """What all sides train: the task, its data, and this rank's share of a batch."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        from stormo.tasks.fashion_mnist import FashionMnist, FashionMnistOptions

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_gpu = options.device == "cuda"
        self.device = torch.device("cuda:0" if self.is_gpu else "cpu")
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        settings: dict[str, Any] = {
            "width": options.width,
            "train_samples": options.samples,
            "data_folder": options.data_folder,
        }
        self.task = FashionMnist(FashionMnistOptions(**settings))
        self.images, self.labels = self.task.train_data().tensors
        self.batch_size = options.global_batch_size // self.size
        self.samples: int = options.samples // (self.batch_size * self.size) * self.batch_size * self.size

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 on a GPU."""
        import torch

        return torch.autocast("cuda", torch.bfloat16) if self.is_gpu else nullcontext()

    def optimizer(self, model: Any, *, fused: bool) -> Any:
        """SGD with momentum."""
        import torch

        return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=_MOMENTUM, fused=fused)

    def loader(self) -> Any:
        """A DataLoader as users write it."""
        from torch.utils.data import DataLoader, TensorDataset

        return DataLoader(
            TensorDataset(self.images, self.labels),
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=_LOADER_PROCESSES,
            pin_memory=self.is_gpu,
            persistent_workers=True,
        )

    def synchronize(self) -> None:
        """Wait for the device, and for the other ranks."""
        import torch
        import torch.distributed as dist

        if self.is_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    def images_per_s(self, epoch: Callable[[int], None]) -> float:
        """Train all epochs; the speed of the last."""
        began_s = 0.0
        for number in range(EPOCHS):
            self.synchronize()
            began_s = time.perf_counter()
            epoch(number)
        self.synchronize()
        return self.samples / (time.perf_counter() - began_s)


def plain(job: Job) -> float:
    """DDP by hand."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    _join(job)
    model = job.task.model().to(job.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    replica = DistributedDataParallel(model, device_ids=[0] if job.is_gpu else None, gradient_as_bucket_view=True)
    return _train_by_hand(job, replica, job.optimizer(replica, fused=True))


def fsdp(job: Job) -> float:
    """FSDP2 by hand: a unit for each block; batch norms in fp32, as torch needs them, in one unit of their own."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from stormo.layers.norm_act import NormAct

    _join(job)
    model: Any = job.task.model().to(job.device)
    half = torch.bfloat16 if job.is_gpu else None
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    norms: list[nn.Module] = [layer for layer in model.modules() if isinstance(layer, NormAct)]
    fully_shard(norms, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    for block in model.blocks:
        if next(block.parameters(), None) is not None:
            fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    # Sharded weights stay contiguous: the activations carry the layout.
    model.stem.register_forward_hook(lambda _, __, out: out.contiguous(memory_format=torch.channels_last))
    return _train_by_hand(job, model, job.optimizer(model, fused=False))  # the fused one takes no DTensor


def _join(job: Job) -> None:
    import torch.distributed as dist

    backend = "nccl" if job.is_gpu else "gloo"
    dist.init_process_group(backend, device_id=job.device if job.is_gpu else None)


def _train_by_hand(job: Job, model: Any, optimizer: Any) -> float:
    images, labels = job.images.to(job.device), job.labels.to(job.device)

    def epoch(number: int) -> None:
        for rows in _rows(job, number):
            with job.autocast():
                loss = job.task.loss(model, (images[rows], labels[rows]))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return job.images_per_s(epoch)


def _rows(job: Job, epoch: int) -> Iterator[Any]:
    """This rank's samples, batch after batch."""
    import torch

    order = torch.randperm(len(job.images), generator=torch.Generator().manual_seed(epoch))[: job.samples]
    yield from order[job.rank :: job.size].to(job.device).split(job.batch_size)


def accelerate(job: Job) -> float:
    """Hugging Face Accelerate."""
    import torch

    package = importlib.import_module("accelerate")
    accelerator = package.Accelerator(mixed_precision="bf16" if job.is_gpu else "no", cpu=not job.is_gpu)
    model = job.task.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model, optimizer, loader = accelerator.prepare(model, job.optimizer(model, fused=False), job.loader())

    def epoch(number: int) -> None:
        for batch in loader:
            loss = job.task.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return job.images_per_s(epoch)


def lightning(job: Job) -> float:
    """Lightning."""
    import torch

    package = importlib.import_module(package_of("lightning") or "lightning.pytorch")
    times_s: list[float] = []

    class Module(package.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = job.task.model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def training_step(self, batch: Any, index: int) -> Any:
            return job.task.loss(self.net, batch)

        def configure_optimizers(self) -> Any:
            return job.optimizer(self, fused=False)

        def on_train_epoch_start(self) -> None:
            job.synchronize()
            times_s.append(time.perf_counter())

        def on_train_end(self) -> None:
            job.synchronize()
            times_s.append(time.perf_counter())

    trainer = package.Trainer(
        accelerator="gpu" if job.is_gpu else "cpu",
        devices=1,
        num_nodes=job.size,
        strategy="ddp",
        precision="bf16-mixed" if job.is_gpu else "32-true",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), job.loader())
    return job.samples / (times_s[-1] - times_s[-2])


SIDES: dict[str, Callable[[Job], float]] = {
    "plain": plain,
    "fsdp": fsdp,
    "accelerate": accelerate,
    "lightning": lightning,
}


def main() -> None:
    """Train as one rank; rank 0 prints the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=float, default=10.0, help="of the WideResNet (default: 10)")
    parser.add_argument("--samples", type=int, default=60_000, help="images of an epoch")
    parser.add_argument("--global-batch-size", type=int, default=512)
    parser.add_argument("--data-folder", help="with the data set's files")
    options = parser.parse_args()
    job = Job(options)
    images_per_s = SIDES[options.side](job)
    if job.rank == 0:
        print(json.dumps({FIGURE: images_per_s}), flush=True)
    import torch.distributed as dist

    if dist.is_initialized():  # Lightning may have left it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
