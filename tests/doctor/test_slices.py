"""`stormo doctor --slices` on a stand-in for NVML and for nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stormo.doctor import command, slices
from stormo.doctor.slices import cut, largest, show_slices
from stormo.errors import EXIT_USAGE, SettingError
from stormo.system.nvml import Nvml, Profile, open_nvml
from tests.fake_nvml import H200_PROFILES, Card, FakeNvml, NVMLError, cut_h200
from tests.golden import check_golden

_CUT = "nvidia-smi mig -i 0 -cgi {} -C"
_DESTROY = ["nvidia-smi mig -i 0 -dci", "nvidia-smi mig -i 0 -dgi"]


class Machine:
    """GPUs, and an nvidia-smi that changes them."""

    def __init__(self, *cards: Card, fails: str = "") -> None:
        self.library = FakeNvml(list(cards))
        self.typed: list[str] = []
        self._fails = fails

    def open(self) -> Nvml:
        return open_nvml(lambda _: self.library)

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        assert self.library.num_open == 0  # NVML of our own could keep the mode from changing
        self.typed.append(" ".join(words))
        if self._fails and self._fails in self.typed[-1]:
            return subprocess.CompletedProcess(words, 3, "In use by another client\n", "")
        card = self.library.cards[int(words[words.index("-i") + 1])]
        if "-mig" in words:
            card.instances = [None] * 7 if words[-1] == "1" else []
        elif "-cgi" in words:
            count = len(words[words.index("-cgi") + 1].split(","))
            card.instances = cut_h200(0, count).instances
        elif not any(card.instances):
            return subprocess.CompletedProcess(words, 6, "No compute instances found\n", "")
        return subprocess.CompletedProcess(words, 0, "", "")

    def cut(self, count: int) -> list[str]:
        cut(count, self.open, self.run)
        return self.typed


def processes(*pids: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid) for pid in pids]


def whole(number: int = 0, **tells: object) -> Card:
    card = cut_h200(number)
    card.instances = []
    card.tells |= tells
    return card


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.mark.parametrize(
    ("count", "ids"),
    [(7, "19,19,19,19,19,19,19"), (5, "19,19,19,19,19"), (4, "15,15,15,15"), (3, "14,14,14"), (2, "9,9"), (1, "0")],
)
def test_the_largest_slices_that_fit_are_cut(count: int, ids: str) -> None:
    machine = Machine(whole())
    assert machine.cut(count) == [*_DESTROY, "nvidia-smi -i 0 -mig 1", _CUT.format(ids)]
    assert len(machine.open().instances()) == count


def test_slices_are_undone() -> None:
    machine = Machine(cut_h200())
    assert machine.cut(0) == [*_DESTROY, "nvidia-smi -i 0 -mig 0"]
    assert not machine.open().instances()


def test_a_profile_with_media_engines_is_not_chosen() -> None:
    plain, media = (
        Profile(id=number, name=name, most=7, multiprocessors=16, memory_bytes=1)
        for number, name in ((19, "1g.18gb"), (21, "1g.18gb-me"))
    )
    assert largest([media, plain], 7) is largest([plain, media], 7) is plain


def _not_root(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return Machine(whole())


def _chosen_not_root(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    return Machine(whole(0), whole(1))


def _two(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(whole(0), whole(1))


def _hidden(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "foo")
    return Machine(whole())


@pytest.mark.parametrize(
    ("make", "count", "words"),
    [
        (_not_root, 7, "only root may cut a GPU"),
        (_chosen_not_root, 7, "type sudo CUDA_VISIBLE_DEVICES=1 stormo doctor --slices 7"),
        (_two, 7, "2 GPUs are visible"),
        (lambda _: Machine(cut_h200(0, 3), whole(1)), 7, "2 GPUs are visible"),
        (_hidden, 7, r"no GPU is visible \(CUDA_VISIBLE_DEVICES=foo\)"),
        (lambda _: Machine(Card("GPU-v", "Tesla V100")), 7, "cannot be cut"),
        (
            lambda _: Machine(whole(ComputeRunningProcesses=processes(11, 12))),
            7,
            r"GPU 0 is in use by 2 processes \(pid 11, 12\)",
        ),
        (lambda _: Machine(whole()), 8, "at most 7 slices fit"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], Machine], count: int, words: str
) -> None:
    machine = make(monkeypatch)
    with pytest.raises(SettingError, match=words) as caught:
        machine.cut(count)
    assert caught.value.exit_code == EXIT_USAGE
    assert machine.typed == []
    assert machine.library.num_open == 0


def test_a_process_on_a_slice_keeps_it() -> None:
    card = cut_h200()
    instance = card.instances[2]
    assert instance is not None
    instance.tells = {**instance.tells, "ComputeRunningProcesses": processes(77)}
    with pytest.raises(SettingError, match="pid 77"):
        Machine(card).cut(0)


def test_one_gpu_of_several_is_chosen_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    machine = Machine(whole(0), whole(1))
    assert machine.cut(2)[-1] == "nvidia-smi mig -i 1 -cgi 9,9 -C"


def test_the_words_of_nvidia_smi_are_passed_on() -> None:
    with pytest.raises(SettingError, match="-mig 1 failed with exit code 3: In use by another client"):
        Machine(whole(), fails="-mig 1").cut(7)


def test_a_mode_that_waits_for_a_reset_is_named() -> None:
    machine = Machine(whole())
    machine.run = lambda words: subprocess.CompletedProcess(words, 0, "", "")  # type: ignore[method-assign]
    with pytest.raises(SettingError, match="at its next reset"):
        machine.cut(7)


def test_what_there_is() -> None:
    before_mode = whole(2, profiles=NVMLError("Not Supported"))
    cards = (whole(0), cut_h200(1, 2), before_mode, cut_h200(3, 0), Card("GPU-v", "Tesla V100"))
    check_golden(Path(__file__).parent / "golden" / "slices.txt", show_slices(Machine(*cards).open))


def test_what_there_is_as_json() -> None:
    (found,) = json.loads(show_slices(Machine(cut_h200(0, 1)).open, as_document=True))
    assert found["slices"] == [{"uuid": "MIG-00", "name": "NVIDIA H200 MIG 1g.18gb"}]
    assert len(found["profiles"]) == len(H200_PROFILES)
    assert found["profiles"][0]["id"] == 19


def test_the_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cuts: list[int] = []
    monkeypatch.setattr(slices, "cut", lambda count, say: cuts.append(count))
    monkeypatch.setattr(slices, "show_slices", lambda as_document: f"shown {as_document}\n")
    assert [command.main(["--slices", *words]) for words in ([], ["7"], ["0", "--json"])] == [0, 0, 0]
    assert cuts == [7, 0]
    assert capsys.readouterr().out == "shown False\nshown False\nshown True\n"
    for wrong in ("many", "-1", "1.5"):
        with pytest.raises(SettingError, match="is no whole number from 0 on"):
            command.main(["--slices", wrong])


def test_slices_are_of_this_machine_in_a_job_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slices, "show_slices", lambda as_document: "shown\n")
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert command.main(["--slices"]) == 0
    assert capsys.readouterr().out == "shown\n"
    with pytest.raises(SettingError, match="--num-gpus was set with --slices, but"):
        command.main(["--slices", "--num-gpus", "2"])


def test_without_nvml_it_says_why() -> None:
    library = FakeNvml([], init=NVMLError("Driver Not Loaded"))
    with pytest.raises(SettingError, match="Driver Not Loaded"):
        show_slices(lambda: open_nvml(lambda _: library))


def test_a_machine_without_gpus_is_told_so() -> None:
    with pytest.raises(SettingError, match="NVML lists no GPU"):
        show_slices(Machine().open)
