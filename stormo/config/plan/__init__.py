"""The arithmetic of a run: (settings, devices, facts of the task) -> every effective value, with its reason.

Pure functions of numbers; every check of a user's settings is here, so that it fails before any process starts.
"""

from stormo.config.plan.batch import no_validation_samples, num_ghost_batches
from stormo.config.plan.plan import Plan, check_settings, resolve, with_layers, with_micro_batches, with_task_optimizer
from stormo.config.plan.steps import Facts

__all__ = [
    "Facts",
    "Plan",
    "check_settings",
    "no_validation_samples",
    "num_ghost_batches",
    "resolve",
    "with_layers",
    "with_micro_batches",
    "with_task_optimizer",
]
