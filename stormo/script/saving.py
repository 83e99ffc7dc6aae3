"""Saves and loads all that a script needs to resume: models, optimizers, schedulers, loaders, random generators.

One checkpoint for all workers, in the form of those of `stormo train`: atomic, verified, loaded without running code.
Any number of workers can load what any other has saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from stormo import checkpoint
from stormo.checkpoint import CorruptCheckpointError, Snapshot
from stormo.data.generators import seed_generators
from stormo.data.order import derive_seed
from stormo.distributed.values import decode, encode
from stormo.distributed.world import World
from stormo.errors import SettingError
from stormo.script.loop import Loop
from stormo.script.sharding import like, whole_tensors
from stormo.script.stepping import Group

_IDENTITY = "script"
_PLAIN = "plain/"


def save(loop: Loop, folder: Path, extra: dict[str, Any], *, keep: int) -> None:
    """Publish a checkpoint; all workers call it, rank 0 writes, and all raise what goes wrong there."""
    _require_whole_step(loop)
    for loader in loop.iterating:
        loader.end_batch()
    _require_same_places(loop)
    world = loop.world
    loop.check_replicas("what is saved")
    random_tensors, random_json = checkpoint.collect_random_state()
    gathered = world.gather_bytes(safetensors.torch.save({n: t.contiguous() for n, t in random_tensors.items()}))
    random_states = world.gather_objects(random_json)
    if gathered is not None:
        own = {f"{r}/{n}": t for r, payload in enumerate(gathered) for n, t in safetensors.torch.load(payload).items()}

    # All workers gather shards, each in turn; what every worker has whole is rank 0's to collect.
    sharded = {group: _group_tensors(_prefix(loop, group), group) for group in loop.groups if group.is_sharded}

    def write() -> None:
        _require_newest(loop, folder)
        plain: dict[str, Tensor] = {}
        state = {
            "world_size": world.size,
            "random": random_states,
            "groups": encode([_group_state(group) for group in loop.groups], plain, "groups"),
            "loaders": encode({n: loader.state() for n, loader in loop.loaders.items()}, plain, "loaders"),
            "extra": encode(extra, plain, "extra"),
        }
        tensors = [sharded.get(group) or _group_tensors(_prefix(loop, group), group) for group in loop.groups]
        snapshot = Snapshot(
            model={name: tensor for model, _ in tensors for name, tensor in model.items()},
            optimizer={name: tensor for _, optimizer in tensors for name, tensor in optimizer.items()},
            ranks=own | {_PLAIN + name: tensor.cpu() for name, tensor in plain.items()},
            state=state,
        )
        step = loop.num_steps
        checkpoint.save(folder, snapshot, checkpoint.RetentionPolicy(step=step, identity=_IDENTITY, keep_last=keep))
        loop.folders.add(folder.resolve())

    world.on_rank_0(write)


def load(loop: Loop, folder: Path) -> dict[str, Any] | None:
    """Take over the newest checkpoint of a folder, on all workers; its extra values, or None if there is none."""
    world = loop.world
    path, snapshot = world.on_rank_0(lambda: _read(folder)) or (None, None)
    path = world.broadcast_object(path)
    loop.folders.add(folder.resolve())
    if path is None:
        return None
    state = world.broadcast_object(snapshot.state if snapshot else None)
    tensors = world.broadcast_tensors(snapshot.ranks if snapshot else None)
    model = world.broadcast_tensors(snapshot.model if snapshot else None)
    optimizer = world.broadcast_tensors(snapshot.optimizer if snapshot else None)
    plain = {name.removeprefix(_PLAIN): tensor for name, tensor in tensors.items() if name.startswith(_PLAIN)}
    groups, loaders = decode(state["groups"], plain), decode(state["loaders"], plain)
    _require_count(path, "calls of world.wrap()", len(loop.groups), len(groups))
    # Only those of a training: a script may make loaders for validation as it goes.
    trained = [number for number, saved in loaders.items() if saved["trains"]]
    _require_count(path, "training loaders", sum(number in loop.loaders for number in trained), len(trained))
    for group, saved in zip(loop.groups, groups, strict=True):
        _load_group(_prefix(loop, group), group, saved, model, optimizer, path)
    loop.is_accumulating = loop.has_micro_batch = False
    for number, loader in loop.loaders.items():
        if number in loaders:
            loader.load_state(loaders[number])
    if world.rank < state["world_size"]:
        own = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(f"{world.rank}/")}
        checkpoint.restore_random_state(own, state["random"][world.rank])
    else:
        seed_generators(derive_seed("resume", loop.num_steps, world.rank))
    extra = decode(state["extra"], plain)
    assert isinstance(extra, dict)
    return extra


def _read(folder: Path) -> tuple[str, Snapshot] | None:
    found = checkpoint.find(folder)
    if not found:
        return None
    called = f"world.load({str(folder)!r}) was called"
    try:
        snapshot = checkpoint.load(found[0].path)
    except CorruptCheckpointError as error:
        good, _ = checkpoint.newest_good(folder)
        older = f"resume from step {good.step}" if good else "start over"
        why = f"the newest checkpoint there is damaged ({error.path.name}: {error.problem})"
        raise SettingError(called, why, f"remove the folder {found[0].path} to {older}") from None
    if not {"groups", "loaders", "extra"} <= snapshot.state.keys():
        raise SettingError(
            called, f"{found[0].path.name} there is not from world.save()", "give a folder of script checkpoints"
        )
    return str(found[0].path), snapshot


def _require_whole_step(loop: Loop) -> None:
    if loop.is_accumulating or any(gate.is_pending for group in loop.groups for gate in group.gates):
        raise SettingError(
            "world.save() was called between world.backward() and optimizer.step()",
            "a checkpoint holds no gradients, and that batch would be lost",
            "call it after optimizer.step(), or after optimizer.zero_grad() if no step follows",
        )
    counts = [loader.batch_info.num_steps for loader in loop.iterating if loader.batch_info is not None]
    if len({count > 1 for count in counts if count}) > 1:
        raise SettingError(
            "world.save() was called in a training loop inside the loop over another loader",
            "a resume would be in the middle of the inner loop with the next batch of the outer one",
            "call it after the inner loop",
        )
    for group in loop.groups:
        group.require_wrapped("world.save() was called")


def _require_same_places(loop: Loop) -> None:
    """All workers load rank 0's positions: a loader must have the same one everywhere."""
    states = {str(number): loader.state() for number, loader in loop.loaders.items()}
    here = {number: f"epoch {state['epoch'] + 1}, sample {state['position']}" for number, state in states.items()}
    positions: list[dict[str, str]] = loop.world.broadcast_object(loop.world.gather_objects(here))
    for rank, theirs in enumerate(positions):
        for number, main in positions[0].items():
            # One that is no longer in use may be gone on some workers sooner than on others.
            if theirs.get(number, main) != main:
                raise SettingError(
                    f"world.save() was called with loader {int(number) + 1} at {main} on rank 0",
                    f"it is at {theirs[number]} on rank {rank}",
                    "let all workers leave their loops alike: an iterator kept in a variable is still active, and "
                    "its close() ends it",
                )


def _require_newest(loop: Loop, folder: Path) -> None:
    """Refuse to write behind the checkpoints of another run, which the next load would take for the newest."""
    found = checkpoint.find(folder)
    if found and found[0].step > loop.num_steps and folder.resolve() not in loop.folders:
        raise SettingError(
            f"world.save({str(folder)!r}) was called at step {loop.num_steps}",
            f"a checkpoint of step {found[0].step} is there that was not loaded, and the next load would take that one",
            "call world.load() of that folder first, or give another folder",
        )


def _prefix(loop: Loop, group: Group) -> str:
    # A single model keeps its own names, so that other programs can read the file.
    return "" if len(loop.groups) == 1 else f"{loop.groups.index(group)}/"


def _names(group: Group) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in group.model.named_parameters()}


def _group_tensors(prefix: str, group: Group) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    state = group.model.state_dict()
    model = {prefix + name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    optimizer = {
        f"{prefix}{index}/{name}": tensor
        for index, optimizer in enumerate(group.optimizers)
        for name, tensor in checkpoint.flatten_optimizer(optimizer, _names(group)).items()
    }
    if group.is_sharded:
        return whole_tensors(model, group.loop.world), whole_tensors(optimizer, group.loop.world)
    return model, optimizer


def _group_state(group: Group) -> dict[str, Any]:
    return {
        "num_steps": group.num_steps,
        "kinds": _kinds(group),
        "model": {name: value for name, value in group.model.state_dict().items() if not isinstance(value, Tensor)},
        "settings": [
            [{key: value for key, value in settings.items() if key != "params"} for settings in optimizer.param_groups]
            for optimizer in group.optimizers
        ],
        "others": [other.state_dict() for other in group.others],
    }


def _kinds(group: Group) -> list[str]:
    return [type(part).__name__ for part in (*group.optimizers, *group.others)]


def _load_group(
    prefix: str, group: Group, saved: dict[str, Any], model: dict[str, Tensor], optimizer: dict[str, Tensor], path: str
) -> None:
    tensors = {n.removeprefix(prefix): t for n, t in model.items() if n.startswith(prefix)}
    own = group.model.state_dict()
    for name, tensor in tensors.items():
        here = own.get(name)
        if isinstance(here, Tensor) and here.dtype != tensor.dtype:  # the optimizer's state would not fit
            there, mine = (str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, here.dtype))
            raise SettingError(
                f"{path} was to be loaded",
                f"{name} is of type {there} there and of type {mine} in the model",
                f"load it into a model of type {there}",
            )
    try:
        if group.is_sharded:
            tensors = {name: like(tensor, own.get(name)) for name, tensor in tensors.items()}
        group.model.load_state_dict(tensors | saved["model"])
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (lines[1] if len(lines) > 1 else lines[0]).rstrip(".")
        raise SettingError(
            f"{path} was to be loaded", f"it does not fit the model ({reason})", "load it into the same model"
        ) from None
    if _kinds(group) != saved["kinds"]:
        raise SettingError(
            f"world.load() was called in a script that has wrapped {', '.join(_kinds(group)) or 'no optimizer'}",
            f"{path} holds the state of {', '.join(saved['kinds']) or 'none'}",
            "wrap the same ones, or start in another folder",
        )
    for index, each in enumerate(group.optimizers):
        start = f"{prefix}{index}/"
        state = {name.removeprefix(start): t for name, t in optimizer.items() if name.startswith(start)}
        if group.is_sharded:
            parameters = dict(group.model.named_parameters())
            state = {name: like(tensor, parameters.get(name.partition("|")[0])) for name, tensor in state.items()}
        checkpoint.restore_optimizer(each, _names(group), state)
        for settings, values in zip(each.param_groups, saved["settings"][index], strict=True):
            settings.update(values)
    for other, values in zip(group.others, saved["others"], strict=True):
        other.load_state_dict(values)
    group.num_steps = saved["num_steps"]
    for gate in group.gates:
        gate.cleared()
    for parameter in group.model.parameters():
        parameter.grad = None


def _require_count(path: str, what: str, here: int, there: int) -> None:
    if here != there:
        raise SettingError(
            f"world.load() was called when the script had {here} {what}",
            f"{path} holds {there}",
            "call it after every world.wrap() and world.loader(), in a script that makes the same ones",
        )


def synchronise_generators(world: World) -> None:
    """Give every worker rank 0's random state: splits and weights that a script draws are the same then."""
    tensors, values = checkpoint.collect_random_state()
    shared = world.broadcast_tensors(tensors)
    values = world.broadcast_object(values)
    shared.pop("cuda_rng", None)
    checkpoint.restore_random_state(shared, values)
    if torch.cuda.is_initialized() and "cuda_rng" in tensors:
        torch.cuda.manual_seed(torch.initial_seed())
