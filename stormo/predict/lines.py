"""A forecast as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from stormo.errors import counted
from stormo.predict.advice import Advice
from stormo.predict.terms import GIB, RULES, Forecast, Model
from stormo.predict.ways import Way
from stormo.system.hardware import GPU_SHARE

_WIDTH = 110
_COLUMNS = ("weights", "gradients", "state", "activations", "other")
_OWN = ("weights", "gradients", "state", "activations")


def report(
    model: Model,
    found: Sequence[tuple[Way, Forecast | None]],
    *,
    title: str,
    memory_bytes: int,
    kept_per_sample: float | None,
    notices: Sequence[str],
    advice: Advice,
    command: str,
) -> list[str]:
    """Everything, for a reader."""
    lines = [title, *_facts(model, kept_per_sample), ""]
    room = GPU_SHARE * memory_bytes / GIB
    batches = {one.batch for _, one in found if one is not None}
    samples = f" with {counted(max(batches), 'sample')} in a pass" if len(batches) == 1 else ""
    limit = f"fits: at most {room:.1f}, {GPU_SHARE:.0%} of it"
    lines += [f"GiB of one GPU, which has {memory_bytes / GIB:.1f},{samples}; {limit}".replace(",;", ";"), ""]
    lines += _table(found, shows_batch=len(batches) > 1)
    lines += [""] + [line for notice in notices for line in textwrap.wrap(f"{notice}.", _WIDTH)]
    names = [name for name in RULES if any(one is not None and one.terms.get(name) for _, one in found)]
    rules = "; ".join(f"{name}: {RULES[name]}" for name in names)
    lines += textwrap.wrap(f"other, by rules of thumb: {rules}.", _WIDTH)
    lines += ["", *textwrap.wrap(advice.text[:1].upper() + advice.text[1:], _WIDTH)]
    return [*lines, f"  {command}"] if command else lines


def _facts(model: Model, kept_per_sample: float | None) -> list[str]:
    kinds: dict[str, int] = {}
    for one in model.parameters:
        kinds[one.dtype] = kinds.get(one.dtype, 0) + one.num_values
    formats = " and ".join(f"{count:,} in {dtype}" for dtype, count in kinds.items())
    frozen = f", {model.num_frozen:,} frozen" if model.num_frozen else ""
    per_value = model.state_bytes / max(model.num_trained, 1)
    lines = [
        f"parameters   {model.num_trained:,} trained{frozen} ({formats})",
        f"optimizer    {model.optimizer}: {per_value:.3g} bytes of state a trained parameter",
    ]
    if kept_per_sample is not None:
        unit, num_bytes = ("MiB", 2**20) if kept_per_sample >= 2**20 else ("KiB", 2**10)
        lines.append(f"activations  {kept_per_sample / num_bytes:,.1f} {unit} a sample kept for backward")
    return lines


def _table(found: Sequence[tuple[Way, Forecast | None]], *, shows_batch: bool) -> list[str]:
    has_host = any(one is not None and one.host_bytes for _, one in found)
    head = [
        "",
        *_COLUMNS,
        "total",
        *(["host"] if has_host else []),
        "fits",
        *(["batch"] if shows_batch else []),
        "largest",
    ]
    rows, reasons = [head], []
    for way, one in found:
        label = way.label + " *" * way.is_as_set
        if one is None:
            reasons.append(f"{way.label}: not possible, {way.reason}")
            continue
        known = one.largest_batch is not None
        cells = [f"{one.terms[name] / GIB:.2f}" for name in _OWN[:3]]
        cells.append(f"{one.terms['activations'] / GIB:.2f}" if known else "?")
        cells.append(f"{(one.total_bytes - sum(one.terms[name] for name in _OWN)) / GIB:.2f}")
        cells.append(f"{one.total_bytes / GIB:.2f}" if known else f"> {one.total_bytes / GIB:.2f}")
        cells += [f"{one.host_bytes / GIB:.1f}" if one.host_bytes else "-"] if has_host else []
        verdict = "yes" if one.fits else "no"
        cells.append(verdict if known or not one.fits else "?")
        cells += [str(one.batch)] if shows_batch else []
        rows.append([label, *cells, "?" if not known else str(one.largest_batch or "none")])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = []
    for row in rows:
        others = (f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([f"{row[0]:<{widths[0]}}", *others]).rstrip())
    if any(row[0].endswith(" *") for row in rows):
        lines.append("* as the settings have it")
    return lines + [line for reason in reasons for line in textwrap.wrap(reason, _WIDTH)]


def as_json(
    model: Model,
    found: Sequence[tuple[Way, Forecast | None]],
    *,
    gpu: Mapping[str, Any],
    notices: Sequence[str],
    advice: Advice,
    command: str,
) -> dict[str, Any]:
    """The same figures, with their units in the keys."""
    return {
        "gpu": dict(gpu),
        "trained_parameters": model.num_trained,
        "frozen_parameters": model.num_frozen,
        "weights_bytes": model.weight_bytes,
        "gradients_bytes": model.gradient_bytes,
        "optimizer": model.optimizer,
        "optimizer_state_bytes": model.state_bytes,
        "buffers_bytes": model.buffer_bytes,
        "ways": [{**_way(way, one), "is_as_set": way.is_as_set} for way, one in found],
        "rules_of_thumb": RULES,
        "notices": list(notices),
        "advice": {"flags": None, "accumulate": None, "text": advice.text, "command": command or None}
        | ({} if advice.key is None else _chosen(found, advice)),
    }


def _chosen(found: Sequence[tuple[Way, Forecast | None]], advice: Advice) -> dict[str, Any]:
    way = next(way for way, _ in found if way.key == advice.key)
    return {"flags": list(way.flags), "accumulate": advice.accumulate}


def _way(way: Way, one: Forecast | None) -> dict[str, Any]:
    if one is None:
        return {"flags": list(way.flags), "is_possible": False, "reason": way.reason}
    is_known = one.largest_batch is not None
    terms: dict[str, Any] = {f"{name}_bytes": round(value) for name, value in one.terms.items()}
    if not is_known:
        terms["activations_bytes"] = None
    return {
        "flags": list(way.flags),
        "is_possible": True,
        **terms,
        "total_bytes": round(one.total_bytes) if is_known else None,
        "allocated_bytes": round(one.allocated_bytes) if is_known else None,
        "kept_for_backward_bytes": None if one.kept_bytes is None else round(one.kept_bytes),
        "host_bytes_per_node": round(one.host_bytes),
        "fits": one.fits if is_known or not one.fits else None,
        "batch_size": one.batch,
        "largest_batch_size": one.largest_batch,
        "largest_accumulated_pass": one.largest_pass if is_known else None,
    }


def title_of(task: str, num_gpus: int, num_nodes: int, name: str, precision: str, source: str) -> str:
    """The first line: what is forecast, and for which devices."""
    nodes = f"{counted(num_nodes, 'node')} × " if num_nodes > 1 else ""
    return f"{task} on {nodes}{num_gpus} × {name} ({source}), {precision}"
