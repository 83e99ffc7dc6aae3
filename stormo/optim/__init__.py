"""Optimizers, parameter groups, learning-rate schedules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stormo.optim.lamb import LAMB
    from stormo.optim.lars import LARC, LARS
    from stormo.optim.muon import Muon
    from stormo.optim.novograd import NovoGrad

__all__ = ["LAMB", "LARC", "LARS", "Muon", "NovoGrad"]


def __getattr__(name: str) -> Any:
    """Imports torch only for those who ask for an optimizer: the arithmetic of schedules does without."""
    if name in __all__:
        import importlib

        module = {"LARC": "lars"}.get(name, name.lower())
        return getattr(importlib.import_module(f"stormo.optim.{module}"), name)
    raise AttributeError(f"module 'stormo.optim' has no attribute {name!r}")
