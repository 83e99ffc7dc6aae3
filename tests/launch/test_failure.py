"""What a failure looks like, and that nothing from outside can look worse."""

from __future__ import annotations

import json
import signal
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormo.errors import SettingError, StormoError
from stormo.launch.failure import (
    MAX_DETAILS_CHARACTERS,
    Failure,
    combined_exit_code,
    of_exception,
    of_exit,
    of_signal,
    printable,
)
from stormo.launch.json_socket import JsonSocket
from stormo.launch.torch_errors import PeerLoss


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_exception_gives_its_first_line_and_its_traceback() -> None:
    failure = of_exception(raised(ValueError("boom\nmore")), rank=1, host="n2", secondary=False)
    assert failure.sentence == "rank 1 on host n2 failed: ValueError: boom"
    assert failure.text().startswith("stormo: rank 1 on host n2 failed: ValueError: boom\nTraceback (most recent")
    assert failure.text().endswith("ValueError: boom\nmore\n")
    assert failure.exit_code == 1


def test_exceptions_are_named_as_python_names_them() -> None:
    def what(error: BaseException) -> str:
        return of_exception(error, rank=0, host="h", secondary=False).what

    assert what(KeyboardInterrupt()) == "failed: KeyboardInterrupt"
    assert what(json.JSONDecodeError("bad", "", 0)).startswith("failed: json.decoder.JSONDecodeError: bad")


def test_an_exception_that_cannot_be_shown_still_is_reported() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    failure = of_exception(raised(BrokenError()), rank=0, host="h", secondary=False)
    assert "(its text cannot be shown)" in failure.sentence


def test_a_setting_error_is_only_its_sentence() -> None:
    failure = of_exception(SettingError("a was set", "b", "set c"), rank=1, host="n2", secondary=False)
    assert failure.text() == "stormo: a was set, but b; set c.\n"
    assert failure.exit_code == 2


def test_an_error_made_for_users_goes_without_traceback_but_names_its_rank() -> None:
    failure = of_exception(raised(StormoError("The file x is cut short.")), rank=1, host="n2", secondary=False)
    assert failure.text() == "stormo: rank 1 on host n2 failed: The file x is cut short.\n"
    assert failure.exit_code == 1


def test_signals_and_exit_codes_are_named() -> None:
    killed = of_signal(signal.SIGKILL, rank=1, host="n2")
    assert killed.sentence == "rank 1 on host n2 was killed by SIGKILL (signal 9)"
    assert "out-of-memory" in killed.text()
    assert "out-of-memory" not in of_signal(signal.SIGSEGV, rank=1, host="n2").text()
    assert "a signal (signal 40)" in of_signal(40, rank=1, host="n2").text()
    assert "exit code 3" in of_exit(3, rank=1, host="n2").text()


def test_a_failure_survives_the_way_over_a_socket() -> None:
    failure = of_exception(raised(ValueError("bo\tom é")), rank=1, host="n2", secondary=True)
    assert Failure.from_message(json.loads(json.dumps(failure.to_message()))) == failure
    of_script = of_exit(3, rank=1, host="n2", keeps_code=True)
    assert of_script.exit_code == 3
    assert Failure.from_message(of_script.to_message()) == of_script


@pytest.mark.parametrize("character", ["x", "\\", "\u4e2d", "\U0001f600", "\udcff", "\x1b"])
def test_the_longest_failure_fits_into_a_line(character: str) -> None:
    failure = of_exception(raised(ValueError(character * 10**6)), rank=1, host="n2", secondary=False)
    assert "characters left out" in failure.details
    assert len(failure.details) < MAX_DETAILS_CHARACTERS + 100
    ours, theirs = socket.socketpair()
    sender, receiver = JsonSocket(ours), JsonSocket(theirs)
    sender.send(failure.to_message())
    while not (messages := receiver.receive()):
        sender.flush()
    assert messages == [failure.to_message()]
    assert Failure.from_message(messages[0]) is not None
    for link in (sender, receiver):
        link.close()


@pytest.mark.parametrize(
    "change",
    [
        *({"kind": "other"}, {"kind": None}, {"who": 3}, {"secondary": 1}),
        *({"loss": 3}, {"loss": {"at": 1}}, {"loss": {"waited_s": True}}, {"loss": {"other": ""}}),
        *({"exit_code": 0}, {"exit_code": "1"}, {"exit_code": 256}, {"kind": "signal", "exit_code": 3}),
    ],
)
def test_a_message_with_a_wrong_value_is_no_failure(change: dict[str, Any]) -> None:
    message = of_exit(3, rank=1, host="n2").to_message()
    assert Failure.from_message(message) is not None
    assert Failure.from_message({**message, **change}) is None


def test_control_characters_from_another_machine_do_not_reach_the_terminal() -> None:
    message = of_exit(3, rank=1, host="n2").to_message()
    failure = Failure.from_message({**message, "host": "n\x1b[2J", "what": "a\x9bb", "details": "x\x1b]0;t\x07\n\ty"})
    assert failure is not None
    assert failure.text() == "stormo: rank 1 on host n?[2J a?b\nx?]0;t?\n\ty\n"
    failure = Failure.from_message({**message, "loss": {"waited_s": 3, "at": "a\x1b[2Jb", "remark": "c\x9bd"}})
    assert failure is not None
    assert failure.loss == PeerLoss(3, "a?[2Jb", "c?d")


@given(text=st.text(st.characters(codec=None)), limit=st.integers(10, 1000))
def test_printable_text_can_always_be_written_and_is_bounded(text: str, limit: int) -> None:
    shown = printable(text, limit)
    shown.encode("utf-8")
    assert len(shown) <= limit + 60
    assert not any(ord(character) < 32 and character not in "\n\t" for character in shown)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, 0], 0),
        ([0, 75], 75),
        ([130, 75, 0], 130),
        ([65, 65], 65),
        ([75, 65], 65),
        ([0, 1], 1),
        ([75, 2], 1),
        ([0, -9], 1),
    ],
)
def test_the_whole_is_0_only_if_all_parts_are(codes: list[int], expected: int) -> None:
    assert combined_exit_code(codes) == expected
