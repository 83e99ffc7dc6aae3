"""What a resume does with each setting that is not the run's: refuse it, take it and say so, or just take it.

Refused is what the saved state would not fit, or what makes the run the run it is. What changes the weights in another
way is taken, as users mean to change it on the way, and said in the line `changed` of the plan. The rest is where and
how the same training runs, when it ends and what it shows. A setting without a row fails a test.
"""

from __future__ import annotations

from stormo.config.strategies import names

# Why each cannot be another.
REFUSED = {
    "task": "another task is another run",
    "run_name": "a run is found by it",
    "runs_folder": "a run is found in it",
    "seed": "the order of all samples follows from it",
    "optimizer": "no other optimizer can take up the state that is saved",
    "grad_averaging": "the momentum that is saved is a mean with it and a sum without",
    "grow_batch": "the steps that are done follow from it",
    "epoch_samples": "the place in the stream is counted in it",
}
SAID = frozenset(
    (
        # batch
        *("batch_size", "global_batch_size", "accumulate", "ghost_batch_size", "max_batch_size", "on_resize"),
        *("sync_batch_norm", "micro_batches"),  # over which samples batch norm takes its statistics
        # rate
        *("base_lr", "base_batch_size", "lr_rule", "warmup_epochs", "warmup_from"),
        *("decay", "decay_every", "decay_factor", "epochs"),  # a decay ends with the last epoch
        # step
        *("momentum", "beta2", "eps", "trust_coefficient", "nesterov", "weight_decay", "clip_norm"),
        *("gradient_noise_batch", "gradient_noise", "gradient_noise_decay"),
        *("average_every", "outer_lr", "outer_momentum"),
        *("staleness", "compress", "compress_rank"),
        # arithmetic
        *("precision", "deterministic"),
        # what is done once the loss is lost
        *("on_divergence", "rollback_factor", "max_rollbacks"),
    )
)
FREE = frozenset(
    (
        # where it runs
        *("num_gpus", "num_nodes", "max_restarts", "launcher", "hosts", "hostfile", "print_commands", "node_id"),
        *("master_addr", "master_port", "device", "backend", "timeout", "strategy", "servers", "mesh", "zero"),
        # how it gets there: the same result but for rounding
        *("compile", "graph", "channels_last", "autotune", "loader", "loader_workers", "validation_batch_size"),
        *("checkpoint_activations", "offload", "shard_modules", "schedule"),
        # when it ends
        *("target_accuracy", "target_loss", "patience"),
        # what it leaves behind and shows
        *("resume", "checkpoint_every", "keep_checkpoints", "async_checkpoint"),
        *("tensorboard", "prometheus", "prometheus_host", "noise_scale"),
        *("energy", "grid_intensity", "energy_price", "currency"),
        # what one call does
        *("config", "dry_run", "plot_schedule", "preflight", "stage", "keep_staged", "profile"),
    )
)
# Strategies under which training is not that of one process: to change to one of them, or from it, is said.
OWN_ALGORITHMS = names(lambda row: row.local_updates)
# Strategies of copies that bring their gradients together, for which --compress is.
COPIES = names(lambda row: row.takes_compression) | {"auto"}
# Of a task's own options: where its data lies, which its facts tell from other data.
FREE_TASK_OPTIONS = frozenset(("data_folder",))
