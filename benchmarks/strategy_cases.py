"""The parallel setups that `benchmarks.strategy_exactness` compares with one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# Learning rates at which 20 steps move the weights visibly and no run diverges.
OPTIMIZERS: Mapping[str, tuple[float, Mapping[str, Any]]] = {
    "sgd": (0.1, {"nesterov": True}),
    "adamw": (0.003, {"eps": 1e-6}),  # with less, rounding of gradients that are next to zero is blown up
    "lars": (5.0, {"nesterov": True}),
    "larc": (0.1, {"nesterov": True}),
    "lamb": (0.01, {}),
    "novograd": (0.01, {}),
    "muon": (0.02, {"eps": 1e-6}),
    "schedule-free-adamw": (0.003, {"eps": 1e-6}),
}
NAMES = ("ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor", "hybrid", "pipeline", "naive", "server", "mesh")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
BOTH, GPT, DEEP, RESNET, NORMED = ("GPT", "WideResNet"), ("GPT",), ("deep GPT",), ("WideResNet",), ("normed MLP",)
_OF_7 = {"tensor": ("GPT of 7 heads", *NORMED), "hybrid": ("WideResNet of 14 classes", *NORMED)}
# Neither batch nor epoch divides by the workers; the last batch of 3 leaves most of 8 workers without a sample.
_UNEVEN = {"global_batch_size": 11, "num_samples": 25}
# A pipeline splits a batch into equal micro-batches. Its last batch is a single sample.
_EVEN = {"global_batch_size": 8, "num_samples": 17}
# Batch norm sees the micro-batches one after the other, as in one process that accumulates them.
_PARTS = {"global_batch_size": 12, "num_samples": 24}
_PARTS_OF_7 = {"global_batch_size": 14, "num_samples": 28}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """How a model is parallelised; `flags` are settings by field name."""

    strategy: str  # one of NAMES
    text: str
    num_workers: int
    tasks: Sequence[str]
    flags: Mapping[str, Any]
    data: Mapping[str, int] = field(default_factory=lambda: _UNEVEN)
    reference_flags: Mapping[str, Any] = field(default_factory=dict)
    control: str = ""  # what is spoiled on purpose: see `strategy_exactness.CONTROLS`


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A setup, for one task under one optimizer."""

    setup: Setup
    task: str
    optimizer: str

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return self.setup.data["num_samples"]

    @property
    def learning_rate(self) -> float:
        """Of the first step."""
        return OPTIMIZERS[self.optimizer][0]

    def flags(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """All settings, with those of the setup or of its reference."""
        common = {"precision": "fp64", "weight_decay": 0.01, "clip_norm": 0.5, "sync_batch_norm": self.is_synchronised}
        named = {"optimizer": self.optimizer, "global_batch_size": self.setup.data["global_batch_size"]}
        return {**common, **named, **OPTIMIZERS[self.optimizer][1], **own}

    @property
    def is_synchronised(self) -> bool:
        """Whether there is batch norm, whose statistics are those of the whole batch."""
        return self.task.startswith("WideResNet") or self.task == "normed MLP"

    @property
    def reference(self) -> tuple[Any, ...]:
        """What names the run of one process that this one must equal."""
        setup = self.setup
        return (
            self.task,
            self.optimizer,
            tuple(setup.data.items()),
            tuple(setup.reference_flags.items()),
        )


def _presets(size: int) -> Iterator[Setup]:
    for name in ("ddp", "zero1", "zero2", "fsdp"):
        yield Setup(
            strategy=name, text=name, num_workers=size, tasks=BOTH if size != 3 else GPT, flags={"strategy": name}
        )
    for servers in (1, 2) if size < 8 else (8,):
        served = {"strategy": "server", "servers": servers}
        text = f"server, {servers} of {size}"
        yield Setup(strategy="server", text=text, num_workers=size, tasks=BOTH if size != 3 else GPT, flags=served)
    if size == 3:  # nothing below divides by it
        return
    if size in (4, 8):
        nodes = {"strategy": "hsdp", "num_nodes": 2, "num_gpus": size // 2}
        yield Setup(strategy="hsdp", text="hsdp, 2 nodes", num_workers=size, tasks=BOTH, flags=nodes)
    for name, tasks in (_OF_7 if size == 7 else {"tensor": GPT, "hybrid": BOTH}).items():
        yield Setup(strategy=name, text=name, num_workers=size, tasks=tasks, flags={"strategy": name})
    naive = {"strategy": "naive"}
    yield Setup(strategy="naive", text="naive", num_workers=size, tasks=DEEP, flags=naive, data=_EVEN)
    for schedule in SCHEDULES:
        if size >= 7 and schedule in ("interleaved", "zero-bubble"):
            continue  # two stages a worker are 14 or more, and the GPT has 8 pieces
        named = {"strategy": "pipeline", "schedule": schedule}
        text = f"pipeline, {schedule}"
        yield Setup(strategy="pipeline", text=text, num_workers=size, tasks=DEEP, flags=named, data=_EVEN)
    if size < 8:
        count, data = (7, _PARTS_OF_7) if size == 7 else (6, _PARTS)
        yield Setup(
            strategy="pipeline",
            text=f"pipeline, 1f1b, {count} micro-batches",
            num_workers=size,
            tasks=RESNET,
            flags={"strategy": "pipeline", "micro_batches": count},
            data=data,
            reference_flags={"accumulate": count},
        )


def _mesh(size: int, mesh: str, tasks: Sequence[str] | None = None, **flags: Any) -> Setup:
    options_text = " ".join(f"{name.replace('_', ' ')} {value}".removesuffix(" True") for name, value in flags.items())
    text = ", ".join(filter(None, (mesh.replace(",", " × "), options_text)))
    usual, data = (DEEP, _EVEN) if "pipeline" in mesh else (GPT, _UNEVEN)
    every = {"mesh": mesh, **flags}
    return Setup(strategy="mesh", text=text, num_workers=size, tasks=tasks or usual, flags=every, data=data)


def batch_norms(size: int) -> Iterator[Setup]:
    """Synchronised batch norm in what can be combined with the sharding of layers, and where that has several axes."""
    if size == 2:
        yield Setup(strategy="tensor", text="tensor", num_workers=2, tasks=NORMED, flags={"strategy": "tensor"})
    if size != 4:
        return
    for mesh in ("replicate=2,tensor=2", "shard=2,tensor=2"):
        yield _mesh(4, mesh, NORMED)
    # Replicas cut their own samples into micro-batches: only whole ones hold those of one process.
    for axis in ("replicate", "shard"):
        whole = _mesh(4, f"pipeline=2,{axis}=2", RESNET, micro_batches=1)
        yield replace(whole, data=_PARTS)
    parts = _mesh(4, "pipeline=2,tensor=2", NORMED, micro_batches=3)
    yield replace(parts, data=_PARTS, reference_flags={"accumulate": 3})


def new_shapes(size: int) -> Iterator[Setup]:
    """A pipeline of shards that makes stages for a new number of samples in the middle of a step."""
    if size == 4:
        short = {"global_batch_size": 16, "num_samples": 27}  # the last step has 5 and 6 samples: 2 + 3, 3 + 3
        yield replace(_mesh(4, "pipeline=2,shard=2", accumulate=2, micro_batches=1), data=short)


def _products(size: int) -> Iterator[Setup]:
    yield from batch_norms(size)
    yield from new_shapes(size)
    if size == 4:
        for zero in (1, 2, 3):
            yield _mesh(4, "replicate=2,shard=2", BOTH, zero=zero)
        for mesh in ("shard=2,tensor=2", "pipeline=2,shard=2"):
            yield from (_mesh(4, mesh, zero=zero) for zero in (1, 2, 3))
        yield from (_mesh(4, f"{mesh}=2,tensor=2") for mesh in ("replicate", "pipeline"))
        yield _mesh(4, "pipeline=2,replicate=2")
        yield _mesh(4, "pipeline=2,shard=2", zero=2, schedule="interleaved")
    if size == 8:
        for zero in (1, 2, 3):
            yield _mesh(8, "replicate=2,shard=2,tensor=2", zero=zero)
        for mesh in ("shard=2,tensor=2", "replicate=2,shard=2", "replicate=2,tensor=2"):
            yield _mesh(8, f"pipeline=2,{mesh}")
        yield _mesh(8, "pipeline=4,shard=2", schedule="interleaved")
        yield _mesh(8, "shard=4,tensor=2", zero=2)


def _options(size: int) -> Iterator[Setup]:
    """Settings that change how a step is computed and not what it is."""
    chosen: Mapping[int, Sequence[tuple[str, Mapping[str, Any]]]] = {
        2: (
            ("zero1", {"accumulate": 2}),
            ("zero1", {"offload": True}),
            ("zero2", {"accumulate": 3}),
            ("zero2", {"offload": True}),
            ("fsdp", {"offload": True}),
            ("tensor", {"checkpoint_activations": True}),
            ("hybrid", {"accumulate": 2}),
            ("pipeline", {"checkpoint_activations": True}),
            ("pipeline", {"accumulate": 2}),
        ),
        4: (("fsdp", {"accumulate": 2}), ("fsdp", {"checkpoint_activations": True})),
    }
    for name, extra in chosen.get(size, ()):
        options_text = " ".join(
            f"{key.replace('_', ' ')} {value}".removesuffix(" True") for key, value in extra.items()
        )
        tasks, data = (DEEP, _EVEN) if name == "pipeline" else (GPT, _UNEVEN)
        flags = {"strategy": name, **extra}
        yield Setup(
            strategy=name, text=f"{name}, {options_text}", num_workers=size, tasks=tasks, flags=flags, data=data
        )
    yield from _averaged(size)
    for more in ({}, {"accumulate": 2}, {"ema": 0.9}) if size == 2 else ({},):
        text = " ".join(f"{key} {value}" for key, value in more.items())
        yield Setup(
            strategy="ddp",
            text=", ".join(filter(None, ("ddp, two optimizers", text))),
            num_workers=size,
            tasks=("GAN",),
            flags={"strategy": "ddp", **more},
            reference_flags={"ema": 0.9} if "ema" in more else {},
        )
    if size == 4:
        yield _mesh(4, "shard=2,tensor=2", checkpoint_activations=True, offload=True, accumulate=2)
        yield _mesh(4, "pipeline=2,shard=2", checkpoint_activations=True, accumulate=2)


def _averaged(size: int) -> Iterator[Setup]:
    """A moving average of the weights and of running statistics beside them."""
    ema = {"ema": 0.9}
    for name in ("ddp", "zero1", "zero2", "fsdp", "tensor", "hybrid", "pipeline", "server") if size == 2 else ():
        tasks, data = (DEEP, _EVEN) if name == "pipeline" else (GPT if name == "tensor" else BOTH, _UNEVEN)
        flags = {"strategy": name, **ema, **({"servers": 2} if name == "server" else {})}
        yield Setup(
            strategy=name,
            text=f"{name}, ema 0.9",
            num_workers=size,
            tasks=tasks,
            flags=flags,
            data=data,
            reference_flags=ema,
        )
    for mesh in ("shard=2,tensor=2", "pipeline=2,shard=2") if size == 4 else ():
        yield replace(_mesh(size, mesh, ema=0.9), reference_flags=ema)


CONTROL_SETUPS = (
    Setup(
        strategy="fsdp",
        text="fsdp, each part by its own norm (control)",
        num_workers=2,
        tasks=GPT,
        flags={"strategy": "fsdp"},
        control="layer norms",
    ),
    Setup(
        strategy="zero2",
        text="zero2, clipped by each worker's own norm (control)",
        num_workers=2,
        tasks=GPT,
        flags={"strategy": "zero2"},
        control="clipping",
    ),
)
_QUICK_MESHES = ("shard=2,tensor=2", "pipeline=2,tensor=2", "pipeline=2,replicate=2")
_MUON_QUICK = ("ddp", "zero1", "fsdp", "tensor", "pipeline")
_CONTROL_OPTIMIZERS = {"layer norms": ("lars", "novograd", "muon", "lamb"), "clipping": ("sgd",)}


def setups(size: int) -> list[Setup]:
    """All setups for a number of workers."""
    controls = CONTROL_SETUPS if size == 2 else ()
    return [*_presets(size), *_products(size), *_options(size), *controls]


def _is_quick(setup: Setup, task: str) -> bool:
    """Whether it is among the few that stand for all."""
    if setup.num_workers == 2:
        is_plain = setup.flags.keys() <= {"strategy", "schedule"}
        is_few = is_plain and (task != "WideResNet" or setup.strategy in ("fsdp", "hybrid"))
        return bool(setup.control) or "ema" in setup.flags or is_few
    return setup.flags.get("mesh") in _QUICK_MESHES and setup.flags.keys() <= {"mesh", "zero"}


def _optimizers(setup: Setup, task: str, *, quick: bool) -> Sequence[str]:
    if setup.control:
        return _CONTROL_OPTIMIZERS[setup.control][-1:] if quick else _CONTROL_OPTIMIZERS[setup.control]
    if task == "GAN":
        return ("adamw",)  # the task's own
    if quick:
        return ("lamb", "muon") if setup.num_workers == 4 or setup.strategy in _MUON_QUICK else ("lamb",)
    if task == "WideResNet":
        return ("sgd", "adamw", "lars", "lamb", "muon") if setup.num_workers == 2 else ("lamb", "muon")
    # All where it is fast: what a number of workers can spoil, these show. Every element is stepped by itself under
    # adamw; lamb takes the norms of whole layers as well, and muon needs all of a matrix.
    is_refused = setup.strategy == "server" or "ema" in setup.flags
    every = [name for name in OPTIMIZERS if name != "schedule-free-adamw" or not is_refused]
    by_size: dict[int, Sequence[str]] = {
        2: every,
        3: ("sgd", "lamb", "muon"),
        4: ("sgd", "adamw", "lamb", "muon"),
    }
    return by_size.get(setup.num_workers, ("adamw", "lamb", "muon"))


def cases(strategies: Sequence[str], *, quick: bool) -> list[Case]:
    """All that is compared, few workers first; controls always."""
    sizes = (2, 4) if quick else (2, 3, 4, 8)
    chosen = [setup for size in sizes for setup in setups(size) if setup.strategy in strategies or setup.control]
    return [
        Case(setup=setup, task=task, optimizer=optimizer)
        for setup in chosen
        for task in setup.tasks
        if not quick or _is_quick(setup, task)
        for optimizer in _optimizers(setup, task, quick=quick)
    ]
