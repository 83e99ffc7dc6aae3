"""The verb `predict`: reads the settings, counts, and says what fits."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from stormo.config.options import take_flags
from stormo.config.schema import TrainConfig, option
from stormo.errors import SettingError, unknown_name
from stormo.predict.advice import Advice, Outcome, Question, advise
from stormo.predict.forecast import gpus_needed
from stormo.predict.lines import as_json, report, title_of
from stormo.predict.retold import command_line, remarks
from stormo.predict.terms import GIB, Forecast
from stormo.predict.ways import Way, every_way
from stormo.system.hardware import KNOWN_GPUS, Gpu, visible_gpus
from stormo.tasks.check import check_made, check_task
from stormo.telemetry.text import write_text
from stormo.training.settings import read_settings

if TYPE_CHECKING:
    from stormo.predict.study import Study

_USAGE = "stormo predict [TASK] [--gpu NAME] [options] [any option of stormo train]"
_MOST_GIB = 10_000


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Predict: the GPUs that there will be."""

    gpu: str | None = option(None, "their kind; default those of this machine", metavar="NAME")
    gpu_memory: float | None = option(None, "GiB of one of them, in place of what is known of it", metavar="GIB")
    network: Literal["fast", "slow"] = option("fast", "between nodes: fast as InfiniBand, slow as Ethernet")
    json: bool = option(False, "print JSON")


def main(arguments: list[str]) -> int:
    """Forecast every way to train the task on these GPUs, and advise one."""
    own, rest = take_flags(
        "stormo predict",
        _USAGE,
        "Say before a job is queued whether TASK will fit on its GPUs, by which strategy and at which batch. "
        "Nothing is trained, and no GPU is needed.",
        arguments,
        ("predict", Predict),
    )
    asked = Predict(**own)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a task prints is no part of the report
        config, task_class = read_settings(rest)
        check_task(task_class)
    gpus, has_nvlink, source = _gpus(asked, config)
    from stormo.predict.study import Study

    with contextlib.redirect_stdout(sys.stderr):
        task = task_class(config.task_options)
        check_made(task)
        study = Study(task, config, gpus)
        found = [study.forecast(way) for way in every_way(config, gpus, study.facts)]
        advice = _advised(asked, config, found, study, has_nvlink)
    chosen = next((way for way, _ in found if way.key == advice.key), None)
    command = ""
    if chosen is not None:
        command = command_line(rest, config, chosen, advice.accumulate, gpus, study.facts)
        advice = replace(advice, text=" ".join([advice.text, *remarks(config, chosen)]))
    num_nodes = int(config.workers.num_nodes)
    if asked.json:
        gpu = {"name": gpus[0].name, "memory_bytes": gpus[0].memory_bytes, "source": source}
        gpu |= {"num_gpus": len(gpus), "num_nodes": num_nodes}
        figures = as_json(study.model, found, gpu=gpu, notices=study.notices, advice=advice, command=command)
        write_text(json.dumps(figures, indent=1) + "\n", sys.stdout)
        return 0
    lines = report(
        study.model,
        found,
        title=title_of(config.task, len(gpus), num_nodes, gpus[0].name, study.precision, source),
        memory_bytes=gpus[0].memory_bytes,
        kept_per_sample=study.kept_per_sample,
        notices=study.notices,
        advice=advice,
        command=command,
    )
    write_text("\n".join(lines) + "\n", sys.stdout)
    return 0


def _gpus(asked: Predict, config: TrainConfig) -> tuple[list[Gpu], bool, str]:
    """The GPUs of a node, whether NVLink is between them, and where that is known from."""
    if config.workers.device == "cpu":
        raise SettingError("--device cpu was set", "the memory of GPUs is forecast", "leave it out, and set --gpu")
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
    """A name that lacks a size or a form may mean several."""
    kinds = [key for key in KNOWN_GPUS if key.startswith(name.lower())]
    if len(kinds) < 2:
        return unknown_name("--gpu", name, KNOWN_GPUS)
    return SettingError(f"--gpu {name} was set", f"there are {len(kinds)} of that name", f"set {' or '.join(kinds)}")


def _advised(
    asked: Predict,
    config: TrainConfig,
    found: Sequence[tuple[Way, Forecast | None]],
    study: Study,
    has_nvlink: bool,
) -> Advice:
    is_set = bool(config.given & {"strategy", "mesh", "offload", "checkpoint_activations"})
    as_set = next(way.key for way, _ in found if way.is_as_set)
    every = {way.key: one for way, one in found if one is not None}
    outcomes = {
        key: Outcome(fits=one.fits and one.largest_batch is not None, batch=one.batch, largest_pass=one.largest_pass)
        for key, one in every.items()
    }
    is_known = any(one.largest_batch is not None for one in every.values())
    if not is_known:
        text = "no strategy is advised, as activations are not known; the totals are what is needed without them."
        return Advice(key=None, accumulate=1, text=text)
    question = Question(
        num_gpus=study.num_gpus,
        num_nodes=int(config.workers.num_nodes),
        has_nvlink=has_nvlink,
        is_fast=asked.network == "fast",
        outcomes=outcomes,
        asked=as_set if is_set else None,
    )
    advice = advise(question)
    smallest = study.smallest() if advice.key is None else None
    if smallest is None:
        return advice
    return advise(replace(question, gpus_needed=gpus_needed(study.model, *smallest)))
