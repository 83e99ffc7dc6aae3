"""Everything a user can set, as frozen dataclasses: the one source of flags, TOML keys and their help.

A class is a TOML section and a heading of `--help`; a field is a key and a flag (`batch_size`, `--batch-size`).
`None` means "chosen automatically", and the choice is printed with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from stormo.config.strategies import StrategyName

Precision = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp64"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


def option(
    default: Any,
    help_text: str,
    *,
    metavar: str | None = None,
    optional_value: bool = False,
    dropped: Mapping[str, str] | None = None,
) -> Any:
    """A field with its line of help; `dropped` maps a value that it once took to what to do instead."""
    metadata = {"help": help_text, "metavar": metavar, "optional_value": optional_value, "dropped": dropped or {}}
    return field(default=default, metadata=metadata)


class NodeRange(int):
    """How many nodes a job that is submitted may get: as a number the most, as text `least:most`."""

    least: int

    def __new__(cls, least: int, most: int) -> NodeRange:
        """Both at least 1."""
        made = super().__new__(cls, most)
        made.least = least
        return made

    def __reduce__(self) -> tuple[type[NodeRange], tuple[int, int]]:  # for copies
        return NodeRange, (self.least, int(self))

    def __repr__(self) -> str:
        return f"{self.least}:{int(self):d}"

    __str__ = __repr__


def least_nodes(num_nodes: int) -> int:
    """How many nodes must take part at least."""
    return num_nodes.least if isinstance(num_nodes, NodeRange) else num_nodes


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Workers: where the training runs."""

    num_gpus: int | None = option(None, "workers on this node: GPUs, or processes on a machine without; default all")
    num_nodes: int | NodeRange = option(
        1, "nodes that take part; start the same command on each; stormo submit also takes 1:4", metavar="N"
    )
    max_restarts: int = option(0, "how often all workers start again from the last checkpoint after a failure")
    launcher: Literal["auto", "ssh"] = option(
        "auto",
        "start the workers of all --hosts from here, over ssh; auto is for this node alone",
        dropped={"mpi": "type mpirun yourself, whose ranks join by themselves: mpirun -n 8 stormo train"},
    )
    hosts: str | None = option(None, "with --launcher: node1,node2 or node[1-4]", metavar="NAMES")
    hostfile: str | None = option(None, "with --launcher: a file of hosts, as mpirun reads it", metavar="FILE")
    print_commands: bool = option(False, "with --launcher: print what it would start, then stop")
    node_id: int = option(0, "which of the nodes this one is, from 0")
    master_addr: str = option("localhost", "address of node 0")
    master_port: int | None = option(None, "port on node 0, 1024 to 49151; default 29500, or any free one on one node")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device of the workers")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "communication library")
    timeout: float = option(600.0, "seconds that a worker waits for the others before it gives up")
    strategy: StrategyName = option(
        "auto", "how the model is spread over the workers, see docs/strategies.md", metavar="NAME"
    )
    servers: int = option(1, "with --strategy server: workers that also keep a part of the weights each, and step it")
    staleness: int = option(0, "with --strategy server: steps that a worker may be ahead of the slowest")
    compress: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none", "how gradients travel between copies of the model, for slow networks; see docs/compression.md"
    )
    compress_rank: int = option(4, "with --compress powersgd: rank of the matrices that travel", metavar="R")
    mesh: str | None = option(
        None,
        "workers along the axes pipeline, replicate, shard, tensor, such as replicate=2,shard=4; instead of --strategy",
        metavar="AXES",
    )
    zero: int | None = option(
        None, "what the axis shard of a --mesh cuts: 1 optimizer state, 2 gradients too, 3 weights too (default)"
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch: how many samples go into one optimizer step."""

    batch_size: int | Literal["auto"] = option(32, "samples of one worker in one pass; auto finds the most that fit")
    global_batch_size: int | None = option(None, "samples of all workers in one step, instead of --batch-size")
    accumulate: int = option(1, "passes whose gradients are summed before a step")
    ghost_batch_size: int | None = option(
        None, "samples whose batch-norm statistics are taken together; default all of a worker's pass"
    )
    grow_batch: str | None = option(
        None,
        "grow the global batch instead of lowering the rate; 30:2x,60:2x doubles it after 30 epochs and after 60",
        metavar="PLAN",
    )
    max_batch_size: int | None = option(
        None, "most samples of one worker in one pass of a batch that has grown; default as at the start"
    )
    on_resize: Literal["keep", "scale"] = option(
        "keep", "where the number of workers changes: keep the global batch, or scale batch and rate with the workers"
    )
    epoch_samples: int | None = option(
        None, "samples that make an epoch, for a stream whose length is not known; it goes on from epoch to epoch"
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer: how the weights move."""

    optimizer: Literal["sgd", "adamw", "lars", "larc", "lamb", "novograd"] = option("sgd", "the rule of a step")
    base_lr: float = option(0.01, "learning rate for one worker, or for --base-batch-size")
    base_batch_size: int | None = option(
        None, "global batch for which --base-lr is right; default one worker's, or a --global-batch-size as set"
    )
    lr_rule: Literal["linear", "sqrt", "none"] = option("linear", "how the rate follows a batch that grew")
    momentum: float = option(0.9, "momentum of sgd, lars, larc; first beta of adamw, lamb, novograd")
    beta2: float | None = option(
        None, "second beta of adamw (default 0.999), lamb (default 0.999), novograd (default 0.98)"
    )
    eps: float | None = option(
        None, "added to the denominator of adamw (default 1e-08), lamb (default 1e-06), novograd (default 1e-08)"
    )
    trust_coefficient: float | None = option(None, "of the rates of lars and larc for each layer (default 0.001)")
    grad_averaging: bool = option(False, "novograd's momentum as a mean, not a sum")
    nesterov: bool = option(False, "Nesterov's momentum")
    weight_decay: float = option(0.0, "weight decay; never on biases and norms")
    warmup_epochs: float = option(5.0, "epochs of linear warm-up, iteration by iteration")
    warmup_from: float | None = option(
        None, "fraction of the rate warm-up starts from; default 1 / workers (1 for a global batch)"
    )
    decay: Literal["none", "cosine", "linear", "step"] = option("none", "how the rate falls after warm-up")
    decay_every: float = option(10.0, "epochs between the steps of --decay step")
    decay_factor: float = option(0.1, "factor of each step of --decay step")
    clip_norm: float | None = option(None, "clip the gradient to this norm")
    gradient_noise_batch: int | None = option(
        None, "give the gradient the noise of a batch as small as this, by a random factor for each sample"
    )
    gradient_noise: float | None = option(
        None, "add normal noise to the gradient, of this variance at first; it fades as steps are done"
    )
    gradient_noise_decay: float = option(
        0.55, "how fast that noise fades: the power of 1 + step that its variance is divided by"
    )
    noise_scale: bool | None = option(
        None, "measure the gradient noise scale, the batch beyond which more workers stop paying"
    )

    average_every: str | None = option(
        None, "with --strategy local: steps (16) or epochs (0.5ep) between two averagings of the weights"
    )
    outer_lr: float = option(1.0, "with --strategy local: how much of their mean change the weights take")
    outer_momentum: float = option(0.0, "with --strategy local: Nesterov's momentum of these changes")

    def of_its_own(self) -> dict[str, float]:
        """What this optimizer takes beside rate, momentum and decay, as set or by default."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in OPTIMIZER_DEFAULTS[self.optimizer].items()
        }


# What each optimizer takes of the settings that not all of them know, and the default of its paper.
OPTIMIZER_DEFAULTS: dict[str, dict[str, float]] = {
    "sgd": {},
    "adamw": {"beta2": 0.999, "eps": 1e-8},
    "lars": {"trust_coefficient": 0.001},
    "larc": {"trust_coefficient": 0.001},
    "lamb": {"beta2": 0.999, "eps": 1e-6},
    "novograd": {"beta2": 0.98, "eps": 1e-8, "grad_averaging": False},
}
NESTEROV_OPTIMIZERS = ("sgd", "lars", "larc")


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed: how the arithmetic is done."""

    precision: Precision = option("auto", "number format of the heavy arithmetic; fp64 is for checking exactness")
    sync_batch_norm: bool = option(False, "batch-norm statistics over all workers")
    compile: bool | None = option(None, "torch.compile")
    graph: bool | None = option(None, "replay a step as a CUDA graph")
    channels_last: bool | None = option(None, "channels-last memory layout for images")
    autotune: bool | None = option(None, "let cuDNN time its convolutions before it chooses")
    loader: Literal["auto", "resident", "streamed"] = option(
        "auto", "data set kept on the device, or streamed by worker processes"
    )
    loader_workers: int | None = option(None, "processes that load data, for each worker")
    validation_batch_size: int = option(256, "samples in one pass of the validation")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding: how a model that does not fit one device is spread."""

    checkpoint_activations: bool = option(False, "forget the activations of each block, compute them again in backward")
    offload: bool = option(False, "keep weights and optimizer state of the axis shard in host memory between steps")
    shard_modules: str | None = option(
        None, "modules that are sharded as one unit each, by name or class; default: repeated blocks", metavar="NAMES"
    )
    schedule: Schedule = option("1f1b", "order of the micro-batches in a pipeline")
    micro_batches: int | None = option(
        None, "parts of a pass that follow one another in a pipeline; default at most 4 a worker"
    )


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop: when training ends."""

    epochs: int = option(40, "at most this many epochs")
    target_accuracy: float | None = option(None, "stop once this validation accuracy is held")
    target_loss: float | None = option(None, "stop once the validation loss is held at or below this")
    patience: int = option(2, "epochs in a row that must reach the target")
    on_divergence: Literal["stop", "rollback", "ignore"] = option(
        "stop", "on divergence: stop, or go back to the last good checkpoint with a lower learning rate"
    )
    rollback_factor: float = option(0.5, "factor of the rate at each rollback")
    max_rollbacks: int = option(3, "rollbacks of a run before it stops")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run: what it leaves behind, and how it goes on."""

    run_name: str | None = option(None, "name of the run's folder; default task and time")
    runs_folder: str = option("runs", "folder of all runs")
    resume: str | None = option(
        None,
        "go on with a run (default: --run-name, or the newest) or a checkpoint",
        metavar="RUN",
        optional_value=True,
    )
    checkpoint_every: str = option("1ep", "steps (500) or epochs (1ep, 0.25ep) between checkpoints; 0 for none")
    keep_checkpoints: int = option(2, "checkpoints kept, besides the best")
    async_checkpoint: bool = option(False, "write checkpoints in the background while training goes on")
    seed: int = option(0, "seed of everything that is random")
    deterministic: bool = option(False, "the same bits every time, at some speed")
    tensorboard: bool = option(True, "write TensorBoard event files")
    prometheus: int | None = option(None, "show the run to Prometheus at this port while it goes on", metavar="PORT")
    prometheus_host: str = option("127.0.0.1", "address to listen on for Prometheus", metavar="HOST")


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy: what the run draws, and what that means."""

    energy: bool = option(True, "measure the energy and the state of every node")
    grid_intensity: float | None = option(None, "grams of CO2e for each kWh of your grid; gives the run's")
    energy_price: float | None = option(None, "price of a kWh; gives the run's cost")
    currency: str = option("EUR", "of that price")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command: what this one call does; not part of the run."""

    config: str | None = option(None, "read settings from a TOML file; flags win over it", metavar="FILE.toml")
    dry_run: bool = option(False, "print every effective value with its arithmetic, then stop")
    plot_schedule: str | None = option(
        None,
        "with --dry-run: draw the rate of every step, here or into FILE.png, .svg or .csv",
        metavar="FILE",
        optional_value=True,
    )
    preflight: bool = option(
        False, "measure every device and every link of the job for a few seconds first, and name a bad one"
    )
    stage: str | None = option(
        None,
        "copy the data to this folder of every node first and read it there; default $SLURM_TMPDIR, $TMPDIR or /tmp",
        metavar="FOLDER",
        optional_value=True,
    )
    keep_staged: bool = option(False, "leave that copy for later runs on the node")
    profile: str | None = option(
        None,
        "record steps with torch's profiler: 10:20 for steps 10 to 19, 10 for ten steps; nvtx marks ranges for Nsight",
        metavar="STEPS",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Effective:
    """What a run was found to mean by its settings; a resume goes on with it, however many workers there are then."""

    global_batch_size: int
    learning_rate: float
    warmup_start: float
    data_sha256: str | None = None  # of what it was trained on, where the task knows it
    num_workers: int | None = None  # that shared the batch at the start; unknown of runs before it was noted
    batch_per_pass: int | None = None  # the most samples of one worker in one pass at the start
    batch_per_worker: int | None = None  # for which the base rate is, where the global batch rests on it
    own_rate_factor: float | None = None  # of the rates of a task's own optimizer, which replace the base rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that a run goes on with in place of the one it had."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        flag = f"--{'no-' * (self.now is False)}{self.key.replace('_', '-')}"
        value = "" if isinstance(self.now, bool) else " left out" if self.now is None else f" {self.now}"
        before = "not set" if self.before is None else self.before
        if isinstance(before, bool):
            before = "on" if before else "off"
        return f"{flag}{value} ({before} before)"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of `stormo train`."""

    task: str = "fashion-mnist"
    task_options: Any = None  # an instance of the task's own Options dataclass
    workers: Workers = field(default_factory=Workers)
    batch: Batch = field(default_factory=Batch)
    optimizer: Optimizer = field(default_factory=Optimizer)
    speed: Speed = field(default_factory=Speed)
    sharding: Sharding = field(default_factory=Sharding)
    stop: Stop = field(default_factory=Stop)
    run: Run = field(default_factory=Run)
    energy: Energy = field(default_factory=Energy)
    command: Command = field(default_factory=Command)
    given: frozenset[str] = frozenset()  # field names the user set, by flag or file
    resumed: Effective | None = None  # of the run that goes on
    changed: tuple[Change, ...] = ()  # what that run is told otherwise now, as far as it changes the result
    auto_batch_size: int = 32  # samples per worker on which batch and rate rest under --batch-size auto


# Of the workers, what only the process knows that the user has typed; no part of the run.
OF_ONE_CALL = ("launcher", "hosts", "hostfile", "print_commands")
EFFECTIVE = "effective"  # the section of a run's config.toml that holds its `Effective`
OF_OTHER_VERBS = ("slurm",)  # sections of a TOML file that `train` leaves to `submit`
SECTIONS: dict[str, type[Any]] = {
    "workers": Workers,
    "batch": Batch,
    "optimizer": Optimizer,
    "speed": Speed,
    "sharding": Sharding,
    "stop": Stop,
    "run": Run,
    "energy": Energy,
    "command": Command,
}
