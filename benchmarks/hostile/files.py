"""Run folders that another account could have prepared, against every verb that reads them.

One healthy run is trained. Every case changes one thing in a copy of it and runs some verbs in a forked process, as
another user if possible, with limits of time and memory. Beside each changed run lies a good one, which `stormo runs`
must still list.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.hostile.intruder import Verdict

ATTACKER, VICTIM = 65534, 54321  # user ids: nobody, and one that no machine has
_LIMIT_S = 40.0
_MEMORY_BYTES = 1536 << 20  # besides what the process has from the start
_ESCAPE = "\x1b]0;owned\x07\x1b[31m"
_TASK = """\
import torch
import stormo


class Small(stormo.Task):
    def model(self):
        return torch.nn.Linear(4, 2)

    def train_data(self):
        return torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))

    validation_data = train_data

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
"""
_FLAGS = ("--device", "cpu", "--batch-size", "16", "--epochs", "1", "--no-energy")


@dataclass(frozen=True, kw_only=True)
class CaseFolders:
    """The folders of one case."""

    runs: Path
    run: Path  # the hostile one
    home: Path  # the victim's
    task: Path

    @property
    def precious(self) -> Path:
        """A file of the victim's that nothing may change."""
        return self.home / "precious"

    @property
    def marker(self) -> Path:
        """What planted code writes."""
        return self.home / "code-was-run"

    @property
    def payload(self) -> str:
        """Python code that leaves the marker."""
        return f"open({str(self.marker)!r}, 'w').close()\n"

    @property
    def checkpoint(self) -> Path:
        """The newest one of the run."""
        return max((self.run / "checkpoints").glob("step-*"))


Change = Callable[[CaseFolders], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One change of a healthy run, and the verbs that read it."""

    name: str
    change: Change
    verbs: Sequence[str] = ("runs", "show", "report")
    refused: bool = True  # whether the verbs must refuse it; otherwise they may also accept it
    is_foreign: bool = False  # whether the folder belongs to the attacker


def run(folder: Path, *, cases: Sequence[Case] | None = None) -> list[Verdict]:
    """Every case, one after the other."""
    healthy = _train_healthy(folder)
    chosen = all_cases(healthy) if cases is None else cases
    import stormo.report.command
    import stormo.training.trainer  # noqa: F401 - once, before the processes of the cases are forked

    verdicts = [_try(folder, healthy, case) for case in chosen if os.geteuid() == 0 or not case.is_foreign]
    return verdicts + (_planted(folder) if cases is None else [])


def all_cases(healthy: Path) -> list[Case]:
    """The table of cases."""
    return [
        *_of_kinds(),
        *_of_objects(healthy, "summary.json"),
        *_of_objects(healthy, "environment.json"),
        *_of_events(healthy),
        *_of_nodes(),
        *_of_config(),
        *_of_terminals(),
        *_of_links(),
        *_of_owners(),
        *_of_checkpoints(),
        *_of_studies(),
    ]


# What lies where a file belongs ------------------------------------------------------------------------------------

_FILES = ("summary.json", "events.jsonl", "config.toml", "environment.json", "nodes/0.jsonl")


def _of_kinds() -> Iterator[Case]:
    kinds: dict[str, Callable[[Path, CaseFolders], None]] = {
        "a pipe": lambda path, _: os.mkfifo(path),
        "a link": lambda path, place: path.symlink_to(place.precious),
        "a link to a device": lambda path, _: path.symlink_to("/dev/zero"),
        "a folder": lambda path, _: path.mkdir(),
        "a sparse file of 1 TB": lambda path, _: _sparse(path, 1 << 40),
        "a sparse file of 300 MB": lambda path, _: _sparse(path, 300 << 20),
        "no UTF-8": lambda path, _: _put(path, b"\xff\xfe{" * 100 + b"\n"),
        "nested deeply": lambda path, _: _put(path, b"[" * 200_000 + b"\n"),
        "nothing": lambda path, _: _put(path, b""),
        "only zeros": lambda path, _: _put(path, bytes(100_000)),
    }
    for file in _FILES:
        for name, make in kinds.items():
            # A line that was cut short and a damaged node file are reported and left out.
            lenient = file.startswith("nodes") or (
                file == "events.jsonl" and name in ("nothing", "nested deeply", "only zeros")
            )
            lenient |= name == "nothing" and file == "config.toml"
            lenient |= file == "config.toml"  # only the page of a report shows anything of it
            yield Case(name=f"{file} is {name}", change=_replaced(file, make), refused=not lenient)
    for file in _FILES:
        yield Case(name=f"{file} cannot be read", change=lambda place, f=file: (place.run / f).chmod(0), refused=False)  # type: ignore[misc]


def _replaced(file: str, make: Callable[[Path, CaseFolders], None]) -> Change:
    def change(place: CaseFolders) -> None:
        path = place.run / file
        path.unlink()
        if file == "events.jsonl":
            (place.run / "summary.json").unlink()  # so that the list reads the events too
        make(path, place)

    return change


# Fields of another type --------------------------------------------------------------------------------------------


def _wrong(value: Any) -> Iterator[tuple[str, Any]]:
    """Values of other types than this one."""
    yield "a list of objects", [{"a": [1]}]
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield "a text", "many"
    elif isinstance(value, str):
        yield "a number", 7
    else:
        yield "a number of 4000 digits", _Raw("9" * 4000)


class _Raw(str):
    """Goes into JSON as it is."""


def _dump(value: Mapping[str, Any]) -> bytes:
    parts = [
        f"{json.dumps(key)}: {item if isinstance(item, _Raw) else json.dumps(item)}" for key, item in value.items()
    ]
    return ("{" + ", ".join(parts) + "}\n").encode()


def _of_objects(healthy: Path, file: str) -> Iterator[Case]:
    content = json.loads((healthy / file).read_bytes())
    for key, value in content.items():
        for name, wrong in _wrong(value):
            verbs = ("runs", "show") if file == "summary.json" else ("show",)
            # Nothing is computed from the names of the machine: any text and number will do.
            refused = value is not None and not (file == "environment.json" and isinstance(value, dict))
            change = _with_object(file, {**content, key: wrong})
            yield Case(name=f"{file}: {key} is {name}", change=change, verbs=verbs, refused=refused)
    for name, whole in {"a list": b"[1]", "null": b"null", "a NaN": b'{"train_time_s": NaN}', "a text": b'"a"'}.items():
        yield Case(name=f"{file} holds {name}", change=lambda place, w=whole: _put(place.run / file, w))  # type: ignore[misc]
    huge = _with_object(file, {**content, "train_time_s": _Raw("1e999"), "num_cpus": _Raw("1e999")})
    yield Case(name=f"{file}: infinite figures", change=huge, refused=False)


def _with_object(file: str, content: Mapping[str, Any]) -> Change:
    return lambda place: _put(place.run / file, _dump(content))


def _of_events(healthy: Path) -> Iterator[Case]:
    lines = (healthy / "events.jsonl").read_bytes().splitlines(keepends=True)
    seen: set[str] = set()
    for number, line in enumerate(lines):
        event = json.loads(line)
        if event["event"] in seen or event["event"] == "run_ended":
            continue
        seen.add(event["event"])
        for key, value in event.items():
            name, wrong = next(iter(_wrong(value)))
            if value is None or key in ("job",):
                continue
            changed = _dump({**event, key: wrong})
            data = b"".join([*lines[:number], changed, *lines[number + 1 :]])
            yield Case(name=f"events.jsonl: {key} of {event['event']} is {name}", change=_with_events(data))
    started = json.loads(lines[0])
    odd: dict[str, bytes] = {
        "a step of 4000 digits": _dump({**started, "resumed_at_step": _Raw("1" + "0" * 4000)}),
        "no time": _dump({key: value for key, value in started.items() if key != "time_unix_s"}),
        "a time of 1e308": _dump({**started, "time_unix_s": _Raw("1e308")}),
        "a line of 20 MB": b'{"event": "notice", "time_unix_s": 1, "text": "' + b"a" * (20 << 20) + b'"}\n',
        "a line of 20 MB without end": b"a" * (20 << 20),
        "a torn last line": lines[0] + b'{"event": "step_do',
        "only names of events": b'{"event": "epoch_done", "time_unix_s": 1}\n'
        + b'{"event": "step_done", "time_unix_s": 1}\n',
        "figures of 1e300": b'{"event": "step_done", "time_unix_s": 1e300, "step": 1, "loss": 1e308}\n' * 3,
        "a million brackets in a text": _dump({**started, "task": "[" * 1_000_000}),
        "workers that are no objects": b'{"event": "epoch_done", "time_unix_s": 1, "epoch": 1, "workers": [1, "a"]}\n',
        "a validation of texts": b'{"event": "epoch_done", "time_unix_s": 1, "validation": {"loss": "a"}}\n',
    }
    for name, data in odd.items():
        yield Case(name=f"events.jsonl: {name}", change=_with_events(data), refused=False)


def _with_events(data: bytes) -> Change:
    def change(place: CaseFolders) -> None:
        (place.run / "summary.json").unlink()
        _put(place.run / "events.jsonl", data)

    return change


def _of_nodes() -> Iterator[Case]:
    start: dict[str, Any] = {
        **{"kind": "start", "time_unix_s": 1.0, "node_id": 0, "host": "a", "machine": "m", "num_nodes": 1},
        **{"resumed_at_step": None, "step": 0, "missing": [], "notes": []},
        "sources": [{"id": "g", "kind": "gpu", "name": "G", "resolution_j": 0.1, "interval_s": 0.1}],
    }
    energy: dict[str, Any] = {
        **{"kind": "energy", "time_unix_s": 2.0, "phase": "training", "step": 1, "joules": {"g": 5.0}},
        "waiting_s": {"input": 0.1},
    }
    changes: list[tuple[str, dict[str, Any]]] = [
        *((f"{key} {name}", {**start, key: wrong}) for key, value in start.items() for name, wrong in _wrong(value)),
        ("num_nodes a billion", {**start, "num_nodes": 10**9}),
        ("num_nodes 10**18", {**start, "num_nodes": 10**18}),
        ("num_nodes negative", {**start, "num_nodes": -5}),
        ("a source without an id", {**start, "sources": [{}]}),
        ("an interval that is a text", {**start, "sources": [{**start["sources"][0], "interval_s": "a"}]}),
    ]
    for name, line in changes:
        yield Case(name=f"nodes: start with {name}", change=_with_node(_dump(line) + _dump(energy)), refused=False)
    for key, value in energy.items():
        for name, wrong in _wrong(value):
            data = _dump(start) + _dump({**energy, key: wrong})
            yield Case(name=f"nodes: {key} is {name}", change=_with_node(data), refused=False)
    odd = {
        "joules of 1e308": _dump(start) + _dump({**energy, "joules": {"g": _Raw("1e308")}}) * 2,
        "a sample of GPUs that are texts": _dump(start) + b'{"kind": "sample", "time_unix_s": 2, "gpus": ["a"]}\n',
        "a sample of figures that are lists": _dump(start)
        + b'{"kind": "sample", "time_unix_s": 2, "cpu_fraction": []}\n',
        "a rollback to a text": _dump(start) + b'{"kind": "rollback", "time_unix_s": 2, "to_step": "a"}\n',
        "no start": _dump(energy),
    }
    for name, data in odd.items():
        yield Case(name=f"nodes: {name}", change=_with_node(data), refused=False)
    long_name = "9" * 200
    yield Case(
        name="nodes: a file with a name of 200 digits",
        change=lambda place: _put(place.run / "nodes" / f"{long_name}.jsonl", _dump(start) + _dump(energy)),
        refused=False,
    )


def _with_node(data: bytes) -> Change:
    return lambda place: _put(place.run / "nodes" / "0.jsonl", data)


# Settings ----------------------------------------------------------------------------------------------------------


def _of_config() -> Iterator[Case]:
    texts = {
        "nested deeply": b"a = " + b"[" * 50_000,
        "a key of 60000 parts": b"a" + b".a" * 60_000 + b" = 1\n",
        "tables in tables": b"[" + b"a." * 40 + b"a]\n",
        "a number of 4000 digits": b"[stop]\nepochs = " + b"9" * 4000 + b"\n",
        "a task that is a number": b"task = 7\n",
        "sections that are numbers": b"workers = 1\nspeed = 2\neffective = 3\n",
        "a section that is a list": b"[[workers]]\n",
        "nothing of use": b"hello = 'a'\n",
        "an effect of texts": b"task = 'x.py'\n[effective]\nlearning_rate = 'fast'\n",
        "not TOML": b"]]]]",
    }
    for name, data in texts.items():
        yield Case(
            name=f"config.toml: {name}",
            change=lambda place, d=data: _put(place.run / "config.toml", d),  # type: ignore[misc]
            verbs=("runs", "show", "report", "resume"),
            refused=False,
        )
    counts = {
        "100000 workers": ("workers", "num_gpus = 100000"),
        "100000 processes that load": ("speed", "loader_workers = 100000"),
        "10**18 epochs": ("stop", "epochs = 1000000000000000000"),
    }
    for name, (section, line) in counts.items():
        yield Case(
            name=f"config.toml: {name}",
            change=_with_setting(section, line),
            verbs=("resume-bare",) if section == "stop" else ("resume",),
            refused=section != "stop",
        )


def _with_setting(section: str, line: str) -> Change:
    def change(place: CaseFolders) -> None:
        path = place.run / "config.toml"
        key = line.partition(" ")[0]
        lines = [old for old in path.read_text().splitlines() if not old.startswith(f"{key} =")]
        lines.insert(lines.index(f"[{section}]") + 1, line)
        path.write_text("\n".join(lines) + "\n")

    return change


# Terminals ---------------------------------------------------------------------------------------------------------


def _of_terminals() -> Iterator[Case]:
    summary = {"run_name": "a", "task": _ESCAPE, "stopped_by": _ESCAPE, "unit": _ESCAPE}
    verbs = ("runs", "show", "report", "runs-tty", "show-tty")
    yield Case(name="escapes in summary.json", change=_with_object("summary.json", summary), verbs=verbs, refused=False)
    environment = {"host": _ESCAPE, "command": [_ESCAPE], "git_commit": _ESCAPE}
    change = _with_object("environment.json", environment)
    yield Case(name="escapes in environment.json", change=change, verbs=verbs, refused=False)
    started = {
        "event": "run_started",
        "time_unix_s": 1,
        "task": _ESCAPE,
        "explanation": [_ESCAPE],
        "job": {"id": _ESCAPE},
    }
    notice = {"event": "notice", "time_unix_s": 2, "kind": _ESCAPE, "text": f"{_ESCAPE}\x9b31m\u202e"}
    change = _with_events(_dump(started) + _dump(notice))
    yield Case(name="escapes in events.jsonl", change=change, verbs=verbs, refused=False)
    start = {"kind": "start", "time_unix_s": 1, "host": _ESCAPE, "num_nodes": 1, "resumed_at_step": None, "sources": []}
    lines = _dump({**start, "notes": [_ESCAPE], "missing": [{"kind": _ESCAPE, "reason": _ESCAPE}]})
    yield Case(name="escapes in nodes", change=_with_node(lines), verbs=verbs, refused=False)
    change = _with_events(_dump({**started, _ESCAPE: 1, "world_size": _ESCAPE}))
    yield Case(name="escapes in what is refused", change=change, verbs=verbs)
    yield Case(
        name="escapes in the name of a folder",
        change=lambda place: _renamed(place, f"a{_ESCAPE}b"),
        verbs=("runs", "runs-tty"),
        refused=False,
    )
    yield Case(
        name="a title in HTML",
        change=_with_object("summary.json", {"task": "</script><script>alert(1)</script>", "stopped_by": "epochs"}),
        refused=False,
    )


def _renamed(place: CaseFolders, name: str) -> None:
    shutil.copytree(place.run, place.runs / name)


# Links that lead to files of the victim's --------------------------------------------------------------------------

_WRITTEN = (".lock", "events.jsonl", "nodes/0.jsonl", "config.toml", "environment.json", "summary.json")


def _of_links() -> Iterator[Case]:
    for file in _WRITTEN:
        yield Case(
            name=f"written through the link {file}",
            change=lambda place, f=file: _link(place, f),  # type: ignore[misc]
            verbs=("resume-energy",),
            refused=False,
        )
        yield Case(
            name=f"written through the hard link {file}",
            change=lambda place, f=file: _hard_link(place, f),  # type: ignore[misc]
            verbs=("resume-energy",),
            refused=False,
        )
    names = [f".{file}.{pid}.tmp" for file in ("summary.json", "config.toml") for pid in range(2, 4)]
    yield Case(
        name="written through links with the names of temporary files",
        change=lambda place: _link(place, *names),
        verbs=("resume-energy",),
        refused=False,
    )
    yield Case(
        name="the page is written through a link",
        change=lambda place: _link(place, "report.html"),
        verbs=("report",),
        refused=False,
    )


def _link(place: CaseFolders, *files: str) -> None:
    for file in files:
        path = place.run / file
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(place.precious)


def _hard_link(place: CaseFolders, file: str) -> None:
    path = place.run / file
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.hardlink_to(place.precious)


# Folders of another account ----------------------------------------------------------------------------------------


def _of_owners() -> Iterator[Case]:
    for target in ("evil.py", "{run}/evil.py", "{run}/evil.py:Evil"):
        yield Case(
            name=f"a run of somebody else's names the task {target}",
            change=lambda place, t=target: _evil(place, t),  # type: ignore[misc]
            verbs=("resume-bare",),
            is_foreign=True,
        )
    yield Case(
        name="a folder that nobody may look into", change=_closed, verbs=("runs",), refused=False, is_foreign=True
    )
    yield Case(name="a run of somebody else's", change=lambda _: None, refused=False, is_foreign=True)
    yield Case(
        name="the compiler's cache belongs to somebody else",
        change=_foreign_cache,
        verbs=("resume-compile",),
        is_foreign=True,
    )
    yield Case(name="anybody may write into the compiler's cache", change=_open_cache, verbs=("resume-compile",))


def _evil(place: CaseFolders, target: str) -> None:
    (place.run / "evil.py").write_text(place.payload)
    (place.runs.parent / "evil.py").write_text(place.payload)
    text = target.format(run=place.run)
    path = place.run / "config.toml"
    lines = [
        f"task = {json.dumps(text)}" if line.startswith("task =") else line for line in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")


def _closed(place: CaseFolders) -> None:
    place.run.chmod(0o700)


def _foreign_cache(place: CaseFolders) -> None:
    (place.home / "cache" / "stormo-compiled").mkdir(parents=True)
    os.chown(place.home / "cache" / "stormo-compiled", ATTACKER, ATTACKER)


def _open_cache(place: CaseFolders) -> None:
    (place.home / "cache" / "stormo-compiled").mkdir(parents=True)
    (place.home / "cache" / "stormo-compiled").chmod(0o777)


# Checkpoints -------------------------------------------------------------------------------------------------------


def _of_checkpoints() -> Iterator[Case]:
    state_changes: dict[str, Callable[[dict[str, Any]], None]] = {
        "world_size a text": lambda state: state.update(world_size="two"),
        "world_size 0": lambda state: state.update(world_size=0),
        "world_size 10**18": lambda state: state.update(world_size=10**18),
        "no world_size": lambda state: state.pop("world_size") and None,
        "progress a list": lambda state: state.update(progress=[1]),
        "a step of 10**4000": lambda state: state["progress"].update(step=10**4000),
        "a step that is a text": lambda state: state["progress"].update(step="7"),
        "an epoch below 0": lambda state: state["progress"].update(epoch=-3),
        "a trend that is a text": lambda state: state["progress"].update(trend="up"),
        "a trend of other fields": lambda state: state["progress"].update(trend={"evil": 1}),
        "random states that are numbers": lambda state: state.update(random=7),
        "random states of numbers": lambda state: state.update(random=[7]),
        "random states for nobody": lambda state: state.update(random=[]),
        "a digest that is none": lambda state: state["progress"].update(sample_order_sha256="zz"),
    }
    for name, change in state_changes.items():
        yield Case(name=f"state.json: {name}", change=_with_state(change), verbs=("resume",))
    yield Case(
        name="state.json nested deeply",
        change=lambda place: _reseal(place.checkpoint, "state.json", b"[" * 200_000),
        verbs=("resume",),
    )
    yield Case(name="optimizer state of another shape", change=_other_shape, verbs=("resume",))
    for name, spans in {
        "tensors that share bytes": [(0, 4 << 20)] * 400,
        "tensors that overlap": [(0, 4 << 20), (4, (4 << 20) + 4)],
    }.items():
        yield Case(name=f"model: {name}", change=_with_spans(spans), verbs=("export",))
    yield Case(name="a digest of other weights", change=_stale_digest, verbs=("export", "resume"))
    yield Case(name="a sparse model of 1 TB", change=_sparse_model, verbs=("export", "resume"))
    sealed: dict[str, bytes] = {
        "a header of 2**60 bytes": (1 << 60).to_bytes(8, "little") + b"{}",
        "a header nested deeply": (100_000).to_bytes(8, "little") + b"[" * 100_000,
        "a header that is a list": (8).to_bytes(8, "little") + b"[1,2,3] ",
        "a shape below 0": _header({"weight": {"dtype": "F32", "shape": [-1, 4], "data_offsets": [0, 16]}}) + bytes(16),
        "an unknown type": _header({"weight": {"dtype": "EVIL", "shape": [4], "data_offsets": [0, 16]}}) + bytes(16),
        "a shape of 2**62": _header({"weight": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 16]}})
        + bytes(16),
        "nothing": b"",
    }
    for name, data in sealed.items():
        yield Case(
            name=f"model.safetensors: {name}",
            change=lambda place, d=data: _reseal(place.checkpoint, "model.safetensors", d),  # type: ignore[misc]
            verbs=("export", "resume"),
        )
    kinds: dict[str, Callable[[Path, CaseFolders], None]] = {
        "a pipe": lambda path, _: os.mkfifo(path),
        "a link": lambda path, place: path.symlink_to(place.precious),
        "a sparse file": lambda path, _: _sparse(path, 1 << 40),
        "garbage": lambda path, _: _put(path, os.urandom(1000)),
    }
    for file in ("manifest.json", "model.safetensors", "state.json"):
        for name, make in kinds.items():
            verbs = ("resume",) if file == "state.json" else ("export", "resume")
            yield Case(name=f"{file} is {name}", change=_in_checkpoint(file, make), verbs=verbs)


def _with_state(change: Callable[[dict[str, Any]], None]) -> Change:
    def apply(place: CaseFolders) -> None:
        sys.set_int_max_str_digits(0)
        state = json.loads((place.checkpoint / "state.json").read_bytes())
        change(state)
        _reseal(place.checkpoint, "state.json", json.dumps(state).encode())

    return apply


def _in_checkpoint(file: str, make: Callable[[Path, CaseFolders], None]) -> Change:
    def change(place: CaseFolders) -> None:
        path = place.checkpoint / file
        path.unlink()
        make(path, place)

    return change


def _reseal(checkpoint: Path, file: str, data: bytes | None, **changes: Any) -> None:
    """Change a file and the manifest: who can write the one can write the other."""
    if data is not None:
        _put(checkpoint / file, data)
    manifest = json.loads((checkpoint / "manifest.json").read_bytes()) | changes
    size = (checkpoint / file).stat().st_size
    digest = "0" * 64 if data is None else hashlib.sha256(data).hexdigest()
    manifest["files"][file] = {"size_bytes": size, "sha256": digest}
    del manifest["manifest_sha256"]

    def canonical(body: Mapping[str, Any]) -> bytes:
        return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()

    manifest["manifest_sha256"] = hashlib.sha256(canonical(manifest)).hexdigest()
    _put(checkpoint / "manifest.json", canonical(manifest))


def _header(content: Mapping[str, Any]) -> bytes:
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _with_spans(spans: Sequence[tuple[int, int]]) -> Change:
    named = {
        f"t{number}": {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for number, (start, stop) in enumerate(spans)
    }
    data = _header(named) + bytes(max(stop for _, stop in spans))
    return lambda place: _reseal(place.checkpoint, "model.safetensors", data)


def _other_shape(place: CaseFolders) -> None:
    import safetensors.torch
    import torch

    path = place.checkpoint / "optimizer.safetensors"
    tensors = {name: torch.zeros(3, 5) if tensor.dim() else tensor for name, tensor in _tensors(path).items()}
    tensors = {name: tensor if "momentum" in name else _tensors(path)[name] for name, tensor in tensors.items()}
    _reseal(place.checkpoint, path.name, safetensors.torch.save(tensors))


def _tensors(path: Path) -> dict[str, Any]:
    import safetensors.torch

    found: dict[str, Any] = safetensors.torch.load(path.read_bytes())
    return found


def _stale_digest(place: CaseFolders) -> None:
    import safetensors.torch

    path = place.checkpoint / "model.safetensors"
    tensors = {name: tensor + 1 for name, tensor in _tensors(path).items()}
    _reseal(place.checkpoint, path.name, safetensors.torch.save(tensors))


def _sparse_model(place: CaseFolders) -> None:
    size = 1 << 30
    named = {
        f"t{number}": {"dtype": "U8", "shape": [size], "data_offsets": [number * size, (number + 1) * size]}
        for number in range(1024)
    }
    path = place.checkpoint / "model.safetensors"
    _put(path, _header(named))
    os.truncate(path, path.stat().st_size + 1024 * size)
    _reseal(place.checkpoint, path.name, None)


# Studies of `stormo scale` -----------------------------------------------------------------------------------------


def _of_studies() -> Iterator[Case]:
    cell = {"name": "strong-1-1", "state": "done", "error": None}
    figures = {"mode": "strong", "workers": 1, "repeat": 1, "samples_per_s": 5.0, "units_per_s": 5.0, "unit": "samples"}
    lines: dict[str, dict[str, Any]] = {
        "a measurement of texts": {**cell, "measurement": {**figures, "samples_per_s": "fast"}},
        "a measurement of nothing": {**cell, "measurement": {"evil": 1}},
        "a measurement of 0": {**cell, "measurement": {**figures, "samples_per_s": 0}},
        "a measurement that is a list": {**cell, "measurement": [1]},
        "no name": {"state": "done"},
    }
    for name, line in lines.items():
        yield Case(
            name=f"scale: {name}",
            change=lambda place, one=line: _study(place, "runs.jsonl", _dump(one)),  # type: ignore[misc]
            verbs=("scale",),
            refused=False,
        )
    for name, data in {"a list": b"[1]", "deep": b"[" * 100_000, "no UTF-8": b"\xff\xfe"}.items():
        yield Case(
            name=f"scale: study.json is {name}",
            change=lambda place, d=data: _study(place, "study.json", d),  # type: ignore[misc]
            verbs=("scale",),
        )


def _study(place: CaseFolders, file: str, data: bytes) -> None:
    (place.home / "study").mkdir()
    _put(place.home / "study" / file, data)


# How a case is run -------------------------------------------------------------------------------------------------


def _arguments(place: CaseFolders, verb: str) -> list[str]:
    runs = ["--runs-folder", str(place.runs)]
    resume = ["train", str(place.task), *_FLAGS, "--epochs", "2", "--resume", str(place.run)]
    return {
        "runs": ["runs", *runs],
        "runs-tty": ["runs", *runs],
        "show": ["show", str(place.run)],
        "show-tty": ["show", str(place.run)],
        "report": ["report", str(place.run)],
        "export": ["export", str(place.run), str(place.home / "out.safetensors"), "--force"],
        "resume": resume,
        "resume-energy": [word for word in resume if word != "--no-energy"] + ["--energy", "--tensorboard"],
        "resume-bare": ["train", "--device", "cpu", "--epochs", "1", "--resume", str(place.run)],
        "resume-compile": [*resume, "--compile"],
        "scale": [
            *("scale", str(place.task), "--device", "cpu", "--workers", "1", "--repeats", "1", "--dry-run"),
            *("--output", str(place.home / "study"), "--batch-size", "16"),
        ],
    }[verb]


def victim() -> int:
    """The user of the verbs: another account, if we are root and that account can read the interpreter."""
    if os.geteuid() != 0:
        return os.geteuid()
    needed = [Path(sys.executable).resolve(), Path(os.__file__), Path(__file__).resolve()]
    folders = {parent for path in needed for parent in path.parents}
    return VICTIM if all(folder.stat().st_mode & 0o001 for folder in folders) else 0


def _environment() -> dict[str, str]:
    """The environment of processes that are not forked: it has this very stormo."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def _train_healthy(folder: Path) -> Path:
    """One good run."""
    task = folder / "small.py"
    task.write_text(_TASK)
    words = [
        "train",
        str(task),
        *_FLAGS,
        "--runs-folder",
        str(folder / "healthy"),
        "--run-name",
        "good",
        "--tensorboard",
    ]
    words = [word for word in words if word != "--no-energy"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "stormo", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=_environment(),
    )
    if done.returncode != 0:
        raise RuntimeError(f"the healthy run ended with {done.returncode}: {done.stderr}")
    return folder / "healthy" / "good"


def _try(folder: Path, healthy: Path, case: Case) -> Verdict:
    place = _prepare(folder / "case", healthy, case)
    try:
        found = [_run_verb(place, case, verb) for verb in case.verbs]
        was_deleted = not place.precious.is_file() or place.precious.read_text() != "precious\n"
        return Verdict(
            name=case.name,
            code_run=place.marker.exists(),
            deleted=was_deleted,
            traceback=any(one.traceback for one in found),
            hang=any(one.hang for one in found),
            memory_exceeded=any(one.memory_exceeded for one in found),
            wrongly_accepted=any(one.wrongly_accepted for one in found),
            detail="; ".join(one.detail for one in found if one.detail),
        )
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", str(folder / "case")], check=False)
        shutil.rmtree(folder / "case")


def _prepare(folder: Path, healthy: Path, case: Case) -> CaseFolders:
    folder.mkdir(mode=0o755)
    place = CaseFolders(
        runs=folder / "runs", run=folder / "runs" / "bad", home=folder / "home", task=folder / "small.py"
    )
    place.runs.mkdir()
    place.home.mkdir()
    shutil.copytree(healthy, place.runs / "good")
    shutil.copytree(healthy, place.run)
    shutil.copy(healthy.parent.parent / "small.py", place.task)
    place.precious.write_text("precious\n")
    case.change(place)
    if os.geteuid() == 0:
        cache = place.home / "cache"
        _own(folder, victim(), but=cache if case.is_foreign else None)
        if case.is_foreign:
            _own(place.run, ATTACKER)
            subprocess.run(["chmod", "-R", "a+rX", str(place.run)], check=True)
            if case.change is _closed:
                _closed(place)
    return place


def _own(folder: Path, user_id: int, but: Path | None = None) -> None:
    for path in [folder, *folder.rglob("*")]:
        if but is None or not path.is_relative_to(but):
            os.chown(path, user_id, user_id, follow_symlinks=False)


def _run_verb(place: CaseFolders, case: Case, verb: str) -> Verdict:
    """Fork, become the victim, run one verb with limits, and judge how it ended."""
    output = place.home / f"output-{verb}"
    terminal = os.openpty() if verb.endswith("-tty") else None
    began_s = time.monotonic()
    child = os.fork()
    if child == 0:
        _become(place, verb, output, None if terminal is None else terminal[1])
    text = b""
    if terminal is not None:
        os.close(terminal[1])
        text = _drain(terminal[0], child)
    hang, status, peak_bytes = _await(child, began_s)
    text += output.read_bytes() if output.exists() else b""
    output.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    said = text.decode(errors="replace")
    is_memory = "MemoryError" in said or peak_bytes > _MEMORY_BYTES + _own_peak_bytes()
    wrong = ""
    if verb.startswith("runs") and (code != 0 or "good" not in said):
        wrong = f"{verb}: the good run is not listed"
    elif case.refused and not verb.startswith("runs") and code == 0:
        wrong = f"{verb}: accepted"
    elif _ESCAPE[:4] in said or "\x9b" in said or "\u202e" in said:
        wrong = f"{verb}: an escape sequence reached the terminal"
    is_traceback = "Traceback (most recent call last)" in said or code < 0
    detail = wrong or (f"{verb}: {said.strip().splitlines()[-1][:300]}" if is_traceback and said.strip() else "")
    return Verdict(
        name=case.name,
        traceback=is_traceback and not hang,
        hang=hang,
        memory_exceeded=is_memory,
        wrongly_accepted=bool(wrong),
        detail=f"{verb}: killed after {_LIMIT_S:g} s" if hang else detail,
    )


def _become(place: CaseFolders, verb: str, output: Path, terminal: int | None) -> None:
    """In the forked process: give up everything, and be `stormo VERB`."""
    code = 70
    try:
        os.setsid()
        with output.open("wb") as file:
            os.dup2(file.fileno() if terminal is None else terminal, 1)
            os.dup2(file.fileno() if terminal is None else terminal, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2 * _MEMORY_BYTES,) * 2)
        if victim() != os.geteuid():
            os.setgroups([])
            os.setgid(VICTIM)
            os.setuid(VICTIM)
        os.chdir(place.runs.parent)
        os.environ |= {"HOME": str(place.home), "XDG_CACHE_HOME": str(place.home / "cache"), "TERM": "xterm"}
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ.pop(name, None)
        sys.path[:] = [entry for entry in sys.path if entry]
        from stormo.cli import main

        code = main(_arguments(place, verb))
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _drain(master: int, child: int) -> bytes:
    text, began_s = b"", time.monotonic()
    with contextlib.suppress(OSError):  # which is how a terminal ends
        while time.monotonic() - began_s < _LIMIT_S and (piece := os.read(master, 65536)):
            text += piece
    os.close(master)
    return text


def _await(child: int, began_s: float) -> tuple[bool, int, int]:
    """Whether it hung, its status, and the most memory it had."""
    hang = False
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return hang, status, usage.ru_maxrss * 1024
        if time.monotonic() - began_s > _LIMIT_S:
            hang = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.01)


def _own_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Modules in the current folder -------------------------------------------------------------------------------------


def _planted(folder: Path) -> list[Verdict]:
    """Modules of the names of real ones, in the folder where a command is typed."""
    here = folder / "planted"
    here.mkdir()
    marker = here / "code-was-run"
    for name in ("safetensors", "rich", "psutil", "numpy", "torch", "plotly", "pynvml", "dataclasses", "tomllib"):
        (here / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    train = ["train", "language-model", "--device", "cpu", "--dry-run"]
    start = ["train", "fashion-mnist", "--device", "cpu", "--num-gpus", "2", "--task.data-folder", "nowhere"]
    commands = {
        "python -m stormo runs": ["-m", "stormo", "runs"],
        "python -m stormo train": ["-m", "stormo", *train],
        "python -P -m stormo train": ["-P", "-m", "stormo", *train],
        "python -m stormo doctor": ["-m", "stormo", "doctor", "--json"],
        "workers of python -m stormo train": ["-m", "stormo", *start],
    }
    verdicts = []
    for name, words in commands.items():
        marker.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, *words],
            cwd=here,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            env=_environment(),
        )
        said = done.stdout + done.stderr
        is_traceback = "Traceback (most recent call last)" in said
        detail = said.strip().splitlines()[-1][:300] if is_traceback else ""
        verdicts.append(
            Verdict(name=f"planted: {name}", code_run=marker.exists(), traceback=is_traceback, detail=detail)
        )
    shutil.rmtree(here)
    return verdicts


def _put(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def _sparse(path: Path, size_bytes: int) -> None:
    path.touch()
    os.truncate(path, size_bytes)
