"""The arithmetic of a run: (settings, devices, facts of the task) -> every effective value, with its reason.

Pure functions of numbers; every check of a user's settings is here, so that it fails before any process starts.
"""

from stormo.config.plan.batch import no_validation_samples, num_ghosts
from stormo.config.plan.facts import Facts
from stormo.config.plan.layers import with_layers
from stormo.config.plan.plan import Plan, check_settings, resolve, with_own_optimizer, with_passes

__all__ = [
    "Facts",
    "Plan",
    "check_settings",
    "no_validation_samples",
    "num_ghosts",
    "resolve",
    "with_layers",
    "with_own_optimizer",
    "with_passes",
]
