"""The state of a process's random generators: torch (CPU, the current CUDA device), Python, NumPy's global one.

Generators that a program makes for itself, and other accelerators, are not covered.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stormo.errors import StormoError


def collect_random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The generators' states: the large parts as CPU tensors, the rest as JSON-ready values."""
    tensors = {"torch_rng": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        tensors["cuda_rng"] = torch.cuda.get_rng_state().cpu()
    version, words, gauss_next = random.getstate()
    tensors["python_rng"] = torch.tensor(words, dtype=torch.int64)
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    if numpy_state["bit_generator"] != "MT19937":
        raise StormoError(
            f"NumPy's global generator was set to {numpy_state['bit_generator']}, which a checkpoint cannot hold; "
            "keep the default MT19937, or use a generator of your own and store its state with the task."
        )
    tensors["numpy_rng"] = torch.tensor(numpy_state["state"]["key"].astype(np.int64), dtype=torch.int64)
    return tensors, {
        "python": {"version": version, "gauss_next": gauss_next},
        "numpy": {
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
    }


def restore_random_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> tuple[str, ...]:
    """Set the generators; returns a sentence for each that this process and the stored state do not share."""
    try:
        python, numpy = values["python"], values["numpy"]
        torch.set_rng_state(tensors["torch_rng"].cpu())
        random.setstate((python["version"], tuple(tensors["python_rng"].tolist()), python["gauss_next"]))
        words = tensors["numpy_rng"].cpu().numpy().astype(np.uint32)
        # NumPy indexes its memory with the position and does not check it.
        if words.shape != (624,) or not 0 <= numpy["position"] <= 624:
            raise ValueError("NumPy's generator has 624 words and a position among them")
        np.random.set_state(("MT19937", words, numpy["position"], numpy["has_gauss"], numpy["gauss"]))
        if "cuda_rng" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors["cuda_rng"].cpu())
    except KeyError as error:
        raise StormoError(f"The stored random state has no {error}.") from error
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise StormoError(f"The stored random state cannot be restored ({error}).") from error
    if "cuda_rng" in tensors and not torch.cuda.is_available():
        return ("The random state of the CUDA generator was not restored: this process has no CUDA device.",)
    if "cuda_rng" not in tensors and torch.cuda.is_initialized():
        return ("The CUDA generator was not restored: the state was stored by a process without a CUDA device.",)
    return ()
