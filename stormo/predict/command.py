"""The verb `predict`: reads the settings, counts, advises, and prints the forecast as text or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from stormo.config.options import take_flags
from stormo.config.schema import TrainConfig, option
from stormo.errors import SettingError, pluralize, unknown_name
from stormo.predict.advice import Advice, Outcome, Question, advise
from stormo.predict.candidates import Candidate, command_line, list_candidates, remarks
from stormo.predict.forecast import GIB, RULES, Forecast, ModelSize, gpus_needed
from stormo.system.hardware import GPU_SHARE, KNOWN_GPUS, Gpu, visible_gpus
from stormo.tasks.check import check_init, check_task
from stormo.telemetry.runs_folder import align
from stormo.telemetry.text import write_text
from stormo.training.settings import read_settings

if TYPE_CHECKING:
    from stormo.predict.forecaster import Forecaster


_USAGE = "stormo predict [TASK] [--gpu NAME] [options] [any option of stormo train]"
_MOST_GIB = 10_000


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict: the GPUs to train on."""

    gpu: str | None = option(None, "kind of the GPUs; default those of this machine", metavar="NAME")
    gpu_memory: float | None = option(None, "GiB of one GPU, instead of the published memory", metavar="GIB")
    network: Literal["fast", "slow"] = option("fast", "between nodes: fast like InfiniBand, slow like Ethernet")
    json: bool = option(False, "print JSON")


def main(arguments: list[str]) -> int:
    """Forecast every candidate for these GPUs, and advise one."""
    own, rest = take_flags(
        "stormo predict",
        _USAGE,
        "Say before a job is queued whether TASK will fit on its GPUs, with which strategy and batch. "
        "Nothing is trained, and no GPU is needed.",
        arguments,
        ("predict", Predict),
    )
    asked = Predict(**own)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints
        config, task_class = read_settings(rest)
        check_task(task_class)
    gpus, has_nvlink, source = _gpus(asked, config)
    from stormo.predict.forecaster import Forecaster

    with contextlib.redirect_stdout(sys.stderr):
        task = task_class(config.task_options)
        check_init(task)
        forecaster = Forecaster(task, config, gpus)
        found = [forecaster.forecast(candidate) for candidate in list_candidates(config, gpus, forecaster.facts)]
        advice = _advised(asked, config, found, forecaster, has_nvlink)
    chosen = next((candidate for candidate, _ in found if candidate.key == advice.key), None)
    command = ""
    if chosen is not None:
        command = command_line(rest, config, chosen, advice.accumulate, gpus, forecaster.facts)
        advice = replace(advice, text=" ".join([advice.text, *remarks(config, chosen)]))
    num_nodes = int(config.workers.num_nodes)
    if asked.json:
        gpu = {"name": gpus[0].name, "memory_bytes": gpus[0].memory_bytes, "source": source}
        gpu |= {"num_gpus": len(gpus), "num_nodes": num_nodes}
        figures = as_json(forecaster.model, found, gpu=gpu, notices=forecaster.notices, advice=advice, command=command)
        write_text(json.dumps(figures, indent=1) + "\n", sys.stdout)
        return 0
    nodes = f"{pluralize(num_nodes, 'node')} × " if num_nodes > 1 else ""
    lines = report(
        forecaster.model,
        found,
        title=f"{config.task} on {nodes}{len(gpus)} × {gpus[0].name} ({source}), {forecaster.precision}",
        memory_bytes=gpus[0].memory_bytes,
        kept_per_sample=forecaster.kept_per_sample,
        notices=forecaster.notices,
        advice=advice,
        command=command,
    )
    write_text("\n".join(lines) + "\n", sys.stdout)
    return 0


def _gpus(asked: Predict, config: TrainConfig) -> tuple[list[Gpu], bool, str]:
    """The GPUs of a node, whether NVLink connects them, and where their memory is known from."""
    if config.workers.device == "cpu":
        raise SettingError("--device cpu was set", "only the memory of GPUs is forecast", "leave it out, and set --gpu")
    if asked.gpu_memory is not None and not 0 < asked.gpu_memory <= _MOST_GIB:
        why = f"it is the GiB of one GPU, above 0 and at most {_MOST_GIB}"
        raise SettingError(f"--gpu-memory {asked.gpu_memory:g} was set", why, "set --gpu-memory 40")
    memory_bytes = None if asked.gpu_memory is None else int(asked.gpu_memory * GIB)
    if asked.gpu is not None:
        known = KNOWN_GPUS.get(asked.gpu.lower())
        if known is None:
            raise _unknown_gpu(asked.gpu)
        source = "published memory" if memory_bytes is None else "memory as set"
        return [known.described(memory_bytes)] * (config.workers.num_gpus or 1), known.has_nvlink, source
    if memory_bytes is not None:
        made = Gpu(name=f"GPU with {asked.gpu_memory:g} GiB", memory_bytes=memory_bytes, capability=(8, 0))
        return [made] * (config.workers.num_gpus or 1), False, "memory as set"
    visible = visible_gpus()
    if not visible:
        raise SettingError(
            "no --gpu was set",
            "this machine has no GPU whose memory could be meant",
            "set --gpu h100-80gb or another kind, or --gpu-memory to the GiB of one",
        )
    has_nvlink = any(known.name == visible[0].name and known.has_nvlink for known in KNOWN_GPUS.values())
    return visible[:1] * (config.workers.num_gpus or len(visible)), has_nvlink, "visible here"


def _unknown_gpu(name: str) -> SettingError:
    """A name without a size may mean several GPUs."""
    kinds = [key for key in KNOWN_GPUS if key.startswith(name.lower())]
    if len(kinds) < 2:
        return unknown_name("--gpu", name, KNOWN_GPUS)
    return SettingError(f"--gpu {name} was set", f"there are {len(kinds)} of that name", f"set {' or '.join(kinds)}")


def _advised(
    asked: Predict,
    config: TrainConfig,
    found: Sequence[tuple[Candidate, Forecast | None]],
    forecaster: Forecaster,
    has_nvlink: bool,
) -> Advice:
    is_set = bool(config.given & {"strategy", "mesh", "offload", "checkpoint_activations"})
    as_set = next(candidate.key for candidate, _ in found if candidate.is_as_set)
    every = {candidate.key: one for candidate, one in found if one is not None}
    outcomes = {
        key: Outcome(
            fits=one.fits and one.largest_batch is not None,
            batch=one.batch,
            largest_micro_batch=one.largest_micro_batch,
        )
        for key, one in every.items()
    }
    is_known = any(one.largest_batch is not None for one in every.values())
    if not is_known:
        text = "no strategy is advised, as activations are unknown; the totals do not include them."
        return Advice(key=None, accumulate=1, text=text)
    question = Question(
        num_gpus=forecaster.num_gpus,
        num_nodes=int(config.workers.num_nodes),
        has_nvlink=has_nvlink,
        is_fast=asked.network == "fast",
        outcomes=outcomes,
        asked=as_set if is_set else None,
    )
    advice = advise(question)
    smallest = forecaster.smallest() if advice.key is None else None
    if smallest is None:
        return advice
    return advise(replace(question, gpus_needed=gpus_needed(forecaster.model, *smallest)))


_WIDTH = 110
_COLUMNS = ("weights", "gradients", "state", "activations", "other")
_OWN = ("weights", "gradients", "state", "activations")


def report(
    model: ModelSize,
    found: Sequence[tuple[Candidate, Forecast | None]],
    *,
    title: str,
    memory_bytes: int,
    kept_per_sample: float | None,
    notices: Sequence[str],
    advice: Advice,
    command: str,
) -> list[str]:
    """The forecast as text."""
    lines = [title, *_facts(model, kept_per_sample), ""]
    room = GPU_SHARE * memory_bytes / GIB
    batches = {one.batch for _, one in found if one is not None}
    samples = f" with {pluralize(max(batches), 'sample')} in a micro-batch" if len(batches) == 1 else ""
    limit = f"fits: at most {room:.1f}, {GPU_SHARE:.0%} of it"
    lines += [f"GiB of one GPU, which has {memory_bytes / GIB:.1f},{samples}; {limit}".replace(",;", ";"), ""]
    lines += _table(found, shows_batch=len(batches) > 1)
    lines += [""] + [line for notice in notices for line in textwrap.wrap(f"{notice}.", _WIDTH)]
    names = [name for name in RULES if any(one is not None and one.terms.get(name) for _, one in found)]
    rules = "; ".join(f"{name}: {RULES[name]}" for name in names)
    lines += textwrap.wrap(f"other, by rules of thumb: {rules}.", _WIDTH)
    lines += ["", *textwrap.wrap(advice.text[:1].upper() + advice.text[1:], _WIDTH)]
    return [*lines, f"  {command}"] if command else lines


def _facts(model: ModelSize, kept_per_sample: float | None) -> list[str]:
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


def _table(found: Sequence[tuple[Candidate, Forecast | None]], *, shows_batch: bool) -> list[str]:
    has_host = any(one is not None and one.host_bytes for _, one in found)
    head = ["", *_COLUMNS, "total", *["host"] * has_host, "fits", *["batch"] * shows_batch, "largest"]
    rows, reasons = [head], []
    for candidate, one in found:
        label = candidate.label + " *" * candidate.is_as_set
        if one is None:
            reasons.append(f"{candidate.label}: not possible, {candidate.reason}")
            continue
        known = one.largest_batch is not None
        cells = [f"{one.terms[name] / GIB:.2f}" for name in _OWN[:3]]
        cells.append(f"{one.terms['activations'] / GIB:.2f}" if known else "?")
        cells.append(f"{(one.total_bytes - sum(one.terms[name] for name in _OWN)) / GIB:.2f}")
        cells.append(f"{one.total_bytes / GIB:.2f}" if known else f"> {one.total_bytes / GIB:.2f}")
        cells += [f"{one.host_bytes / GIB:.1f}" if one.host_bytes else "-"] if has_host else []
        cells.append("no" if not one.fits else "yes" if known else "?")
        cells += [str(one.batch)] if shows_batch else []
        rows.append([label, *cells, "?" if not known else str(one.largest_batch or "none")])
    lines = align(rows, num_text_columns=1)
    if any(row[0].endswith(" *") for row in rows):
        lines.append("* as set")
    return lines + [line for reason in reasons for line in textwrap.wrap(reason, _WIDTH)]


def as_json(
    model: ModelSize,
    found: Sequence[tuple[Candidate, Forecast | None]],
    *,
    gpu: Mapping[str, Any],
    notices: Sequence[str],
    advice: Advice,
    command: str,
) -> dict[str, Any]:
    """The forecast as JSON, with units in the keys."""
    chosen = next((candidate for candidate, _ in found if candidate.key == advice.key), None)
    return {
        "gpu": dict(gpu),
        "trained_parameters": model.num_trained,
        "frozen_parameters": model.num_frozen,
        "weights_bytes": model.weight_bytes,
        "gradients_bytes": model.gradient_bytes,
        "optimizer": model.optimizer,
        "optimizer_state_bytes": model.state_bytes,
        "buffers_bytes": model.buffer_bytes,
        "ways": [{**_candidate(candidate, one), "is_as_set": candidate.is_as_set} for candidate, one in found],
        "rules_of_thumb": RULES,
        "notices": list(notices),
        "advice": {
            "flags": None if chosen is None else list(chosen.flags),
            "accumulate": None if chosen is None else advice.accumulate,
            "text": advice.text,
            "command": command or None,
        },
    }


def _candidate(candidate: Candidate, one: Forecast | None) -> dict[str, Any]:
    if one is None:
        return {"flags": list(candidate.flags), "is_possible": False, "reason": candidate.reason}
    is_known = one.largest_batch is not None
    terms: dict[str, Any] = {f"{name}_bytes": round(value) for name, value in one.terms.items()}
    if not is_known:
        terms["activations_bytes"] = None
    return {
        "flags": list(candidate.flags),
        "is_possible": True,
        **terms,
        "total_bytes": round(one.total_bytes) if is_known else None,
        "allocated_bytes": round(one.allocated_bytes) if is_known else None,
        "kept_for_backward_bytes": None if one.kept_bytes is None else round(one.kept_bytes),
        "host_bytes_per_node": round(one.host_bytes),
        "fits": one.fits if is_known or not one.fits else None,
        "batch_size": one.batch,
        "largest_batch_size": one.largest_batch,
        "largest_accumulated_pass": one.largest_micro_batch if is_known else None,
    }
