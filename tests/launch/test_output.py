"""LineBuffer come out whole, whatever pieces they came in."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormo.launch.failure import of_signal
from stormo.launch.output import STDERR, LineBuffer, LogMultiplexer, Stream, write_all


@given(text=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_without_prefix_every_byte_passes_in_order(text: bytes, cuts: list[int]) -> None:
    lines, passed, start = LineBuffer(), b"", 0
    for cut in sorted(cuts):
        passed += b"".join(lines.feed(text[start : max(start, cut)]))
        start = max(start, cut)
    passed += b"".join(lines.feed(text[start:]) + lines.finish())
    assert passed in (text, text + b"\n")


@given(rows=st.lists(st.binary(max_size=30).map(lambda row: row.replace(b"\n", b"").replace(b"\r", b""))))
def test_with_prefix_every_line_carries_it_once(rows: list[bytes]) -> None:
    lines = LineBuffer(b"[rank 1] ")
    text = b"".join(row + b"\n" for row in rows)
    passed = [line for position in range(0, len(text), 7) for line in lines.feed(text[position : position + 7])]
    assert passed == [b"[rank 1] " + row + b"\n" for row in rows]
    assert lines.finish() == []


def test_an_unfinished_line_is_finished_at_the_end() -> None:
    lines = LineBuffer(b"[rank 1] ")
    assert lines.feed(b"a\nhalf") == [b"[rank 1] a\n"]
    assert lines.finish() == [b"[rank 1] half\n"]
    assert lines.finish() == []


def test_a_progress_bar_of_rank_0_moves_and_of_another_rank_shows_its_last_state() -> None:
    drawn = b"\r 10%\r 50%\r100%\n"
    assert b"".join(LineBuffer().feed(b"\r 10%\r 50%")) == b"\r 10%\r"
    assert LineBuffer(b"[rank 1] ").feed(drawn) == [b"[rank 1] 100%\n"]
    assert LineBuffer(b"[rank 1] ").feed(b"windows\r\n") == [b"[rank 1] windows\n"]


def test_a_line_without_end_does_not_grow_for_ever() -> None:
    lines = LineBuffer(b"[rank 1] ")
    passed = b"".join(line for _ in range(40) for line in lines.feed(b"x" * 10_000))
    assert passed.count(b"x") >= 300_000


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    text = b"y" * 300_000
    received = bytearray()

    def read() -> None:
        while chunk := os.read(reader, 65536):
            received.extend(chunk)

    thread = threading.Thread(target=read)
    thread.start()
    write_all(writer, text)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert received == text


def test_a_reader_that_went_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    write_all(writer, b"nobody reads this\n")
    os.close(writer)


@pytest.mark.parametrize("is_wanted", [False, True])
def test_traces_of_native_code_wait_for_their_cause(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_wanted: bool
) -> None:
    monkeypatch.setenv("TORCH_SHOW_CPP_STACKTRACES", str(int(is_wanted)))
    reader, writer = os.pipe()
    log, stream = LogMultiplexer(hold_s=0.0), Stream(reader, STDERR, rank=0, prefix=b"")
    log.take(stream, [b"a warning\n"])
    log.show_held_lines()
    log.take(stream, [b"terminate called after throwing an instance of 'c10::DistBackendError'\n"])
    log.show_held_lines()
    assert capfd.readouterr().err == "a warning\n"
    log.show_cause(of_signal(9, rank=1, host="n2"), and_lines_of=lambda rank: True)
    first, *others = capfd.readouterr().err.splitlines()
    assert first == "stormo: rank 1 on host n2 was killed by SIGKILL (signal 9)"
    assert ("terminate called" in "".join(others)) == is_wanted
    os.close(reader)
    os.close(writer)


def test_an_error_of_nccl_waits_for_the_watchdog_and_a_warning_less(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    for letter, held_s in (("W", 5.0), ("E", 30.0)):
        log, stream, now = LogMultiplexer(hold_s=0.0), Stream(reader, STDERR, rank=0, prefix=b""), time.monotonic()
        monkeypatch.setattr("stormo.launch.output.time.monotonic", lambda now=now: now)
        log.take(stream, [f"[rank2]:[{letter}1118 03:05:11.1 ProcessGroupNCCL.cpp:2057] [PG ID 0] Process\n".encode()])
        for at_s in (held_s - 0.1, held_s):
            monkeypatch.setattr("stormo.launch.output.time.monotonic", lambda now=now, at_s=at_s: now + at_s)
            log.show_held_lines()
            assert log.holds_lines == (at_s < held_s)
        monkeypatch.undo()
    os.close(reader)
    os.close(writer)


def test_lines_that_wait_hold_those_of_their_own_worker_and_traces(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    log = LogMultiplexer(hold_s=0.0)
    first, second = (Stream(reader, STDERR, rank=rank, prefix=b"") for rank in range(2))
    log.take(first, [b"[rank0]:[E1118 03:05:11.1 ProcessGroupNCCL.cpp:2057] [PG ID 0] Process\n"])
    log.take(first, [b"of rank 0\n"])
    log.take(second, [b"of rank 1\n", b"again\n"])
    log.take(second, [b"terminate called without an active exception\n"])
    log.show_held_lines()
    assert capfd.readouterr().err == "of rank 1\nagain\n"
    after_its_time = time.monotonic() + 10.0
    monkeypatch.setattr("stormo.launch.output.time.monotonic", lambda: after_its_time)
    log.show_held_lines()
    assert capfd.readouterr().err == "", "the trace of rank 1 may come of the error of rank 0"
    log.show_held_lines(at_once=True)
    assert capfd.readouterr().err.splitlines()[1:] == ["of rank 0", "terminate called without an active exception"]
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("chunk", "is_held"),
    [
        (b"a warning\nTraceback (most recent call last):\n", True),  # rank 0 has no prefix: its lines come in chunks
        (b"[rank 1] Traceback (most recent call last):\n", True),
        (b"  + Exception Group Traceback (most recent call last):\n", True),
        (b'  File "my.py", line 3\n', True),
        (b"Usage: my.py [OPTIONS]\n", True),
        (b"memory usage: 31 GiB\n", False),
    ],
)
def test_what_a_dying_program_writes_waits_for_the_line_that_names_it(
    capfd: pytest.CaptureFixture[str], chunk: bytes, is_held: bool
) -> None:
    reader, writer = os.pipe()
    log, stream = LogMultiplexer(hold_s=0.0), Stream(reader, STDERR, rank=0, prefix=b"")
    log.take(stream, [chunk])
    log.show_held_lines()
    assert log.holds_lines == is_held
    assert capfd.readouterr().err == ("" if is_held else chunk.decode())
    os.close(reader)
    os.close(writer)
