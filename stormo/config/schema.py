"""Everything a user can set, as frozen dataclasses: the one source of flags, TOML keys and their help.

A class is a TOML section and a heading of `--help`; a field is a key and a flag (`batch_size`, `--batch-size`).
`None` means "chosen automatically", and the choice is printed with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field, is_dataclass
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
    common: bool = False,
    joins: str | None = None,
) -> Any:
    """A field; the short help has it if it is `common`; `joins` stands between the values of a repeated flag."""
    metadata = {"help": help_text, "metavar": metavar, "optional_value": optional_value, "common": common}
    return field(default=default, metadata=metadata | {"joins": joins})


class NodeRange(int):
    """The nodes that a submitted job may get: as a number the maximum, as text `least:most`."""

    least: int

    def __new__(cls, least: int, most: int) -> NodeRange:  # noqa: D102
        made = super().__new__(cls, most)
        made.least = least
        return made

    def __reduce__(self) -> tuple[type[NodeRange], tuple[int, int]]:  # for copies
        return NodeRange, (self.least, int(self))

    def __repr__(self) -> str:
        return f"{self.least}:{int(self):d}"

    __str__ = __repr__


def min_nodes(num_nodes: int) -> int:
    """The nodes a job needs at least."""
    return num_nodes.least if isinstance(num_nodes, NodeRange) else num_nodes


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Workers: where the training runs."""

    num_gpus: int | None = option(
        None, "workers on this node: GPUs, or processes on a machine without; default all", common=True
    )
    num_nodes: int | NodeRange = option(
        1, "nodes of the job; start the same command on each; stormo submit also takes 1:4", metavar="N", common=True
    )
    max_restarts: int = option(0, "restarts of all workers from the last checkpoint after a failure")
    launcher: Literal["auto", "ssh"] = option(
        "auto", "ssh starts the workers of all --hosts from here; auto starts those of this node"
    )
    hosts: str | None = option(None, "with --launcher: node1,node2 or node[1-4]", metavar="NAMES")
    hostfile: str | None = option(None, "with --launcher: a hostfile in mpirun's format", metavar="FILE")
    print_commands: bool = option(False, "with --launcher: print the commands without starting them")
    node_id: int = option(0, "index of this node, from 0")
    master_addr: str = option("localhost", "address of node 0")
    master_port: int | None = option(None, "port on node 0, 1024 to 49151; default 29500, or a free one for one node")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "device of the workers")
    backend: Literal["auto", "nccl", "gloo"] = option("auto", "communication library")
    bind: bool = option(True, "bind each worker to the CPU cores next to its GPU")
    timeout: float = option(600.0, "seconds a worker waits for the others before it fails")
    tune_link: bool | None = option(
        None, "try a few of NCCL's socket settings at the start, and take the fastest; default where it uses sockets"
    )
    strategy: StrategyName = option(
        "auto", "how the model is distributed over the workers, see docs/strategies.md", metavar="NAME", common=True
    )
    servers: int = option(1, "with --strategy server: workers that also hold and step a shard of the weights")
    staleness: int = option(0, "with --strategy server: steps a worker may be ahead of the slowest")
    compress: Literal["none", "bf16", "fp16", "powersgd"] = option(
        "none", "compression of the gradients that replicas exchange, for slow networks; see docs/compression.md"
    )
    compress_rank: int = option(4, "with --compress powersgd: rank of the matrices that are sent", metavar="R")
    mesh: str | None = option(
        None,
        "workers along the axes pipeline, replicate, shard, tensor, such as replicate=2,shard=4; instead of --strategy",
        metavar="AXES",
        common=True,
    )
    zero: int | None = option(
        None, "what the axis shard of a --mesh shards: 1 optimizer state, 2 gradients too, 3 weights too (default)"
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch: how many samples go into one optimizer step."""

    batch_size: int | Literal["auto"] = option(
        32, "samples per worker in one micro-batch; auto finds the most that fit", common=True
    )
    global_batch_size: int | None = option(
        None, "samples of all workers in one step; replaces --batch-size", common=True
    )
    accumulate: int = option(1, "micro-batches whose gradients are summed before a step", common=True)
    ghost_batch_size: int | None = option(
        None, "samples that share batch-norm statistics; default a worker's whole micro-batch"
    )
    grow_batch: str | None = option(
        None,
        "grow the global batch instead of lowering the learning rate; 30:2x,60:2x doubles it after 30 and 60 epochs",
        metavar="PLAN",
    )
    max_batch_size: int | None = option(
        None, "largest micro-batch of one worker once the batch has grown; default as at the start"
    )
    on_resize: Literal["keep", "scale"] = option(
        "keep", "on resume with other workers: keep the global batch, or scale batch and learning rate with the workers"
    )
    epoch_samples: int | None = option(
        None, "samples of an epoch, for a stream of unknown length; each epoch continues where the last one ended"
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer: how the weights move."""

    optimizer: Literal["sgd", "adamw", "lars", "larc", "lamb", "novograd", "muon", "schedule-free-adamw"] = option(
        "sgd", "the update rule", common=True
    )
    base_lr: float = option(0.01, "learning rate for one worker, or for --base-batch-size", common=True)
    base_batch_size: int | None = option(
        None, "global batch for which --base-lr is right; default one worker's, or a --global-batch-size as set"
    )
    lr_rule: Literal["linear", "sqrt", "none"] = option("linear", "how the learning rate follows the batch size")
    momentum: float | None = option(
        None,
        "momentum of sgd, lars, larc (default 0.9), muon (default 0.95); first beta of adamw, schedule-free-adamw, "
        "lamb, novograd (default 0.9)",
    )
    beta2: float | None = option(
        None,
        "second beta of adamw, schedule-free-adamw, muon (default 0.999), lamb (default 0.999), "
        "novograd (default 0.98)",
    )
    eps: float | None = option(
        None,
        "added to the denominator of adamw, schedule-free-adamw, muon (default 1e-08), lamb (default 1e-06), "
        "novograd (default 1e-08)",
    )
    trust_coefficient: float | None = option(None, "scales the layers' learning rates of lars and larc (default 0.001)")
    grad_averaging: bool = option(False, "novograd: momentum as a mean instead of a sum")
    nesterov: bool | None = option(None, "Nesterov momentum, of sgd, lars, larc; of muon (default True)")
    ns_steps: int | None = option(None, "Newton-Schulz iterations of muon (default 5)")
    adjust_lr: Literal["match_rms_adamw", "original"] | None = option(
        None, "how the learning rate of muon (default match_rms_adamw) follows the shape of a matrix"
    )
    adamw_lr: float | None = option(
        None, "muon: learning rate of embeddings, output layer, biases and norms; default --base-lr"
    )
    weight_decay: float = option(0.0, "weight decay; never on biases and norms", common=True)
    warmup_epochs: float = option(5.0, "epochs of linear warm-up, iteration by iteration", common=True)
    warmup_from: float | None = option(
        None, "fraction of the learning rate that warm-up starts from; default 1 / workers (1 for a global batch)"
    )
    decay: Literal["none", "cosine", "linear", "step", "wsd", "wsd-sqrt", "one-cycle"] = option(
        "none", "how the learning rate falls after warm-up; one-cycle has a rise of its own instead", common=True
    )
    decay_every: float = option(10.0, "epochs between the steps of --decay step")
    decay_factor: float = option(0.1, "factor of each step of --decay step")
    decay_share: float | None = option(
        None, "share of all steps in which --decay wsd, wsd-sqrt (default 0.2) and one-cycle (default 0.7) fall"
    )
    clip_norm: float | None = option(None, "clip the gradient to this norm", common=True)
    ema: float | None = option(
        None, "validate and export a moving average of the weights with this decay, such as 0.999", common=True
    )
    freeze: str | None = option(
        None, "do not train the parameters whose names fit, such as 'backbone.*,embed.*'", metavar="NAMES", common=True
    )
    gradient_noise_batch: int | None = option(
        None, "give the gradient the noise of a batch this small, by a random factor for each sample"
    )
    gradient_noise: float | None = option(
        None, "add Gaussian noise of this variance to the gradient; it decays with the steps"
    )
    gradient_noise_decay: float = option(
        0.55, "decay of that noise: its variance is divided by (1 + step) to this power"
    )
    noise_scale: bool | None = option(None, "measure the gradient noise scale: batches beyond it bring little")
    average_every: str | None = option(
        None, "with --strategy local: steps (16) or epochs (0.5ep) between averagings of the weights"
    )
    outer_lr: float = option(1.0, "with --strategy local: learning rate of the outer step")
    outer_momentum: float = option(0.0, "with --strategy local: Nesterov momentum of the outer step")

    def specific_options(self) -> dict[str, Any]:
        """The options of the optimizer, as set or by default."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in OPTIMIZER_DEFAULTS[self.optimizer].items()
        }


DECAY_SHARES = {"wsd": 0.2, "wsd-sqrt": 0.2, "one-cycle": 0.7}  # defaults of --decay-share
CYCLE_START, CYCLE_END = 1 / 25, 1 / 25e4  # of the learning rate, in --decay one-cycle
# The options of each optimizer, with the defaults of its paper. NovoGrad's beta1 is 0.95 there.
_MOMENTUM: dict[str, Any] = {"momentum": 0.9, "nesterov": False}
OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "sgd": _MOMENTUM,
    "adamw": {"momentum": 0.9, "beta2": 0.999, "eps": 1e-8},
    "lars": {**_MOMENTUM, "trust_coefficient": 0.001},
    "larc": {**_MOMENTUM, "trust_coefficient": 0.001},
    "lamb": {"momentum": 0.9, "beta2": 0.999, "eps": 1e-6},
    "novograd": {"momentum": 0.9, "beta2": 0.98, "eps": 1e-8, "grad_averaging": False},
    "muon": {
        **{"momentum": 0.95, "nesterov": True, "ns_steps": 5, "adjust_lr": "match_rms_adamw"},
        **{"adamw_lr": None, "beta2": 0.999, "eps": 1e-8},
    },
    "schedule-free-adamw": {"momentum": 0.9, "beta2": 0.999, "eps": 1e-8},
}


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Speed: how the arithmetic is done."""

    precision: Precision = option(
        "auto", "number format of the heavy arithmetic; fp64 is for checking exactness", common=True
    )
    sync_batch_norm: bool = option(False, "batch-norm statistics over all workers")
    compile: bool | None = option(None, "torch.compile", common=True)
    graph: bool | None = option(None, "replay a step as a CUDA graph")
    channels_last: bool | None = option(None, "channels-last memory layout for images")
    autotune: bool | None = option(None, "let cuDNN time its convolutions and choose the fastest")
    loader: Literal["auto", "resident", "streamed"] = option(
        "auto", "keep the data set on the device, or stream it with loader processes"
    )
    loader_workers: int | None = option(None, "loader processes per worker")
    validation_batch_size: int = option(256, "samples per validation batch")


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Sharding: how a model that does not fit one device is distributed."""

    checkpoint_activations: bool = option(False, "recompute the activations of each block in backward")
    offload: bool = option(False, "keep sharded weights and optimizer state in host memory between steps")
    shard_modules: str | None = option(
        None, "modules that are sharded as one unit, by name or class; default: repeated blocks", metavar="NAMES"
    )
    schedule: Schedule = option("1f1b", "order of the micro-batches in a pipeline")
    micro_batches: int | None = option(None, "micro-batches of a pipeline; default at most 4 per worker")


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Stop: when training ends."""

    epochs: int = option(40, "at most this many epochs", common=True)
    target_accuracy: float | None = option(None, "stop once this validation accuracy is held", common=True)
    target_loss: float | None = option(None, "stop once the validation loss is held at or below this")
    patience: int = option(2, "epochs in a row that must reach the target")
    on_divergence: Literal["stop", "rollback", "ignore"] = option(
        "stop", "on divergence: stop, or roll back to the last good checkpoint with a lower learning rate"
    )
    rollback_factor: float = option(0.5, "factor of the learning rate at each rollback")
    max_rollbacks: int = option(3, "rollbacks of a run before it stops")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Run: its folder, checkpoints and seed."""

    run_name: str | None = option(None, "name of the run's folder; default task and time", common=True)
    runs_folder: str = option("runs", "folder of all runs")
    resume: str | None = option(
        None,
        "resume a run (default: --run-name, or the newest) or a checkpoint",
        metavar="RUN",
        optional_value=True,
        common=True,
    )
    init_from: str | None = option(
        None,
        "start from these weights: a safetensors file, a state dict of torch, or a run",
        metavar="FILE",
        common=True,
    )
    checkpoint_every: str = option("1ep", "steps (500) or epochs (1ep, 0.25ep) between checkpoints; 0 for none")
    keep_checkpoints: int = option(2, "checkpoints kept, besides the best")
    async_checkpoint: bool = option(False, "write checkpoints in the background")
    seed: int = option(0, "seed of everything that is random", common=True)
    deterministic: bool = option(False, "the same bits every time, at some speed")
    tensorboard: bool = option(True, "write TensorBoard event files")
    mlflow: bool = option(False, "record the run in MLflow, where MLFLOW_TRACKING_URI says")
    wandb: bool = option(False, "record the run in Weights & Biases; offline without a login, or as WANDB_MODE says")
    sinks: str | None = option(
        None, "record the run with sinks of other packages, see docs/tracking.md", metavar="NAMES"
    )
    prometheus: int | None = option(None, "serve metrics for Prometheus at this port", metavar="PORT")
    prometheus_host: str = option("127.0.0.1", "address to serve Prometheus on", metavar="HOST")


@dataclass(frozen=True, kw_only=True)
class Energy:
    """Energy: what the run uses and costs."""

    energy: bool = option(True, "measure the energy and the state of every node")
    grid_intensity: float | None = option(None, "grams of CO2e per kWh of your grid, for the emissions of the run")
    energy_price: float | None = option(None, "price of a kWh, for the cost of the run")
    currency: str = option("EUR", "currency of that price")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Command: what this call does; not stored with the run."""

    config: str | None = option(
        None, "read settings from a TOML file; flags win over it", metavar="FILE.toml", common=True
    )
    dry_run: bool = option(False, "print every effective value with its arithmetic, then stop", common=True)
    verbose: bool = option(False, "print the lines of the plan that do not apply here, too")
    plot_schedule: str | None = option(
        None,
        "with --dry-run: draw the learning rate of every step, here or into FILE.png, .svg or .csv",
        metavar="FILE",
        optional_value=True,
    )
    preflight: bool = option(
        False, "first measure every device and link of the job for a few seconds, and report bad ones"
    )
    stage: str | None = option(
        None,
        "first copy the data to this folder on every node; default $SLURM_TMPDIR, $TMPDIR or /tmp",
        metavar="FOLDER",
        optional_value=True,
    )
    keep_staged: bool = option(False, "keep that copy for later runs on the node")
    profile: str | None = option(
        None,
        "record steps with torch's profiler: 10:20 for steps 10 to 19, 10 for ten steps; nvtx marks ranges for Nsight",
        metavar="STEPS",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedBatch:
    """Batch size and learning rate of a run as it started; a resume uses them whatever the number of workers."""

    global_batch_size: int
    learning_rate: float
    warmup_start: float
    data_sha256: str | None = None  # of the data, where the task knows it
    num_workers: int | None = None  # that shared the batch at the start; None in runs of old versions
    micro_batch_size: int | None = None  # the largest of one worker at the start
    batch_per_worker: int | None = None  # samples for which --base-lr holds
    link: dict[str, Any] | None = None  # the fields of a `Link`, where NCCL's settings were chosen for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A setting that differs from the one of the resumed run."""

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
    resumed: ResolvedBatch | None = None  # of the resumed run
    changed: tuple[Change, ...] = ()  # settings that differ from the resumed run and change the result
    auto_batch_size: int = 32  # samples per worker from which --batch-size auto derives batch and learning rate


# Settings of the workers that only the process that the user started needs; not stored with the run.
CALL_ONLY = ("launcher", "hosts", "hostfile", "print_commands")
EFFECTIVE = "effective"  # the section of a run's config.toml that holds its `ResolvedBatch`
OTHER_SECTIONS = ("slurm",)  # sections of a TOML file that only `submit` reads
SECTIONS: dict[str, type[Any]] = {
    name: type(section) for name, section in vars(TrainConfig()).items() if is_dataclass(section)
}
