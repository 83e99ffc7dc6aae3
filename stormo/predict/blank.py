"""The task's model on tensors that have shapes and no memory, made as often as it is wanted."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from stormo.errors import SettingError
from stormo.parallel.meta_init import make_room, without_memory
from stormo.tasks.returned import check_model
from stormo.tasks.task import Task


class Blank:
    """Makes the model on fake tensors, which all belong to one mode."""

    def __init__(self, task: Task, precision: str) -> None:
        # An operation whose shapes torch does not know would be run on real memory of that size.
        self.fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.notices: list[str] = []
        self.frozen: set[str] = set()  # parameters that an optimizer leaves out
        self._task, self._precision = task, precision
        self._on_meta: nn.Module | None = None  # of one that reads its own values while it is made

    def model(self) -> nn.Module:
        """A new one, as one process would have it."""
        model = self._made()
        if self._precision == "fp64":
            self.convert(model, lambda tensor: tensor.double())
        for name, parameter in model.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)
        return model

    def _made(self) -> nn.Module:
        if self._on_meta is None:
            state = torch.get_rng_state()
            try:
                with self.fake, warnings.catch_warnings(action="ignore"):
                    return check_model(self._task, self._task.model())
            except SettingError:
                raise
            except Exception:  # what it is, building it in memory will show
                torch.set_rng_state(state)
                self._on_meta = check_model(self._task, self._task.model())
                without_memory(self._on_meta)
                self.notices.append("The model was built in the memory of this host, as it reads its own values.")
        model = copy.deepcopy(self._on_meta)
        with self.fake:
            make_room(model, torch.device("cpu"))
        return model

    def convert(self, model: nn.Module, change: Callable[[Tensor], Tensor], *, of_norms: bool = True) -> None:
        """Change the floating-point tensors of a model, in place; ties stay."""
        made: dict[int, Tensor] = {}
        with self.fake, torch.no_grad():
            for layer in model.modules():
                if isinstance(layer, nn.modules.batchnorm._NormBase) and not of_norms:
                    continue
                for name, parameter in layer._parameters.items():
                    if parameter is not None and parameter.is_floating_point():
                        if id(parameter) not in made:
                            made[id(parameter)] = nn.Parameter(change(parameter), parameter.requires_grad)
                        layer._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
                for name, buffer in layer._buffers.items() if of_norms else ():
                    if buffer is not None and buffer.is_floating_point():
                        layer._buffers[name] = change(buffer)
