"""What errors of torch, Gloo, NCCL and CUDA mean where only their text says so.

No other file matches such texts. The tests provoke each error; those of NCCL and CUDA are quoted. Imports no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerLoss:
    """A rank misses another one."""

    waited_s: float | None = None  # before it gave up; None where the other was found to be gone
    at: str = ""  # the collective it waited in; empty where it does not say
    remark: str = ""


# The group is the time waited, in the unit of the second entry.
_TIMED_OUT = [
    (re.compile(pattern), unit_s)
    for pattern, unit_s in (
        (r"gloo[^\]]*\].* Timed out waiting (\d+)ms", 1e-3),
        (r"(?:wait|barrier) timeout after (\d+)ms, keys?:", 1e-3),  # the store
        (r"Timed out after (\d+) seconds waiting for clients", 1.0),  # the store, as it opens
        (r"client socket has timed out after (\d+)ms while trying to connect", 1e-3),
        (r"ran for (\d+) milliseconds before timing out", 1e-3),  # NCCL's watchdog
    )
]
_GONE = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        # Gloo says "no error" where a pair was closed under it.
        r"gloo[^\]]*\].*(?:Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Socket closed|no error)",
        r"Failed to (?:recv|send), (?:got|sent) 0 bytes\. Connection was likely closed",  # the store
        r"The client socket has failed to connect to",  # the store
        r"(?:recv|send)\w* failed on .*(?:Connection reset by peer|Broken pipe)",  # the store
        # Other errors of NCCL ("unhandled system error", "invalid usage") are causes unless they name a peer.
        r"NCCL error.*(?:remote process exited or there was a network error|Connection closed by remote peer)",
        r"NCCL error.*Last error:.*(?:Connection reset by peer|Connection refused|Broken pipe)",
        r"NCCL communicator was aborted",
    )
]
_CUT_OFF = ("Connection reset by peer", "Broken pipe")  # the store, in the middle of an answer: nothing says whose
# What NCCL's watchdog writes of a collective before it ends its process.
_COLLECTIVE = re.compile(r"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+)")
SYNCHRONIZES = "synchronizing CUDA operation"  # in the warning of torch.cuda.set_sync_debug_mode
# Traces of C++ code: of the watchdog, of an exception that nobody caught, and the frames below either.
_NATIVE = re.compile(rb"ProcessGroupNCCL|terminate called |  what\(\):  |Exception raised from |frame #\d+: ")
_NCCL_LOG = re.compile(rb"\[E\d+ \S+ ProcessGroupNCCL")
_FRAMES = re.compile(r"^(?:\[rank \d+\] )?(?:Exception raised from .*|frame #\d+: .*)\n?", re.MULTILINE)
_NCCL_PLACE = re.compile(r"(NCCL error) in: \S+\.cpp:\d+,")
_NCCL_REASON = re.compile(r"Last error:\s*(?:\[rank \d+\] )?(\S.*)")
_WATCHDOG_ERROR = re.compile(r"(?:the following async|thread terminated with) exception: (?=NCCL error)")
_OUT_OF_MEMORY = (
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",  # on ARM
)
# cuDNN says so when no algorithm's workspace can be had, but also when it has no algorithm at all.
_PERHAPS_OUT_OF_MEMORY = ("unable to find an engine to execute this computation", "CUDNN_STATUS_NOT_SUPPORTED")
_UNREDUCED = re.compile(r"did not receive grad for rank[^:]*:([\d ]*)")
_TASK_MISTAKES = {
    "dtype": re.compile(
        r"same (?:dtype|datatype)|scalar type|Found dtype|target dtype|type \(\w+\) should be the same"
        r"|type \(torch\.((?:cuda\.)?)\w+\) and weight type \(torch\.\1[A-Z]\w+\) should be the same"  # on one device
    ),
    "sparse": re.compile(r"storage of SparseTensorImpl"),
    "wrapper": re.compile(r"'\w*Parallel' object (?:has no attribute|is not)"),  # Python's text
}


def peer_loss(error: BaseException) -> PeerLoss | None:
    """The loss of a peer that an error reports; None for an error that is itself a cause.

    stormo's own errors carry it in the attribute `peer_loss`.
    """
    known = getattr(error, "peer_loss", None)
    if isinstance(known, PeerLoss):
        return known
    if not isinstance(error, RuntimeError):  # as those of torch.distributed are
        return None
    is_cut_off = type(error).__name__ == "DistNetworkError" and str(error).startswith(_CUT_OFF)
    return PeerLoss() if is_cut_off or is_file_store_timeout(error) else loss_in(str(error))


def loss_in(text: str) -> PeerLoss | None:
    """The loss of a peer that a text reports: of an error, or what a process wrote before NCCL's watchdog ended it."""
    for pattern, unit_s in _TIMED_OUT:
        if found := pattern.search(text):
            waited_s = int(found[1]) * unit_s
            return PeerLoss(waited_s=waited_s if waited_s < 1 else round(waited_s, 1), at=_collective(text))
    return PeerLoss() if any(pattern.search(text) for pattern in _GONE) else None


def watchdog_error(text: str) -> str | None:
    """The error of NCCL for which its watchdog ended a process, by what that wrote; None where there is none."""
    found = _WATCHDOG_ERROR.search(text)
    return None if found is None else first_line(text[found.end() :])


def _collective(text: str) -> str:
    found = _COLLECTIVE.search(text)
    return "" if found is None else f"{found[2].lower()} of {found[3]} elements, number {found[1]} of NCCL"


def is_nccl_error(line: bytes) -> bool:
    """Whether torch logs an error of NCCL, some seconds before its watchdog ends the process."""
    return _NCCL_LOG.search(line) is not None


def is_native_trace(line: bytes) -> bool:
    """Whether a line belongs to the trace of C++ code, which often comes before its cause is known."""
    return _NATIVE.search(line) is not None


def wants_native_traces() -> bool:
    """Whether the user has asked torch for the traces of C++ code."""
    return os.environ.get("TORCH_SHOW_CPP_STACKTRACES") == "1"


def without_frames(text: str) -> str:
    """Without the frames and places of C++ code, unless they are wanted."""
    return text if wants_native_traces() else _NCCL_PLACE.sub(r"\1:", _FRAMES.sub("", text))


def first_line(text: str) -> str:
    """The first line of an error, with NCCL's own reason, which stands further below."""
    line = without_frames(next(iter(text.splitlines()), ""))
    found = _NCCL_REASON.search(text) if "NCCL error" in line else None
    return line if found is None else f"{line}: {found[1]}"


def is_file_store_timeout(error: RuntimeError) -> bool:
    """Whether torch's FileStore timed out; it does not say after how long."""
    return str(error) == "Wait timeout"


def is_out_of_memory(error: BaseException, in_doubt: bool = False) -> bool:
    """Whether memory was refused; `in_doubt` is the answer for a text that may mean something else."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
        return True
    texts = (*_OUT_OF_MEMORY, *_PERHAPS_OUT_OF_MEMORY) if in_doubt else _OUT_OF_MEMORY
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def is_single_value_per_channel(error: BaseException) -> bool:
    """Whether batch norm got one value per channel, of which there are no statistics."""
    return isinstance(error, ValueError) and "more than 1 value per channel" in str(error)


def unreduced_parameters(error: RuntimeError) -> list[int] | None:
    """The numbers of the parameters that DDP still waits for; None for any other error."""
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" not in text:
        return None
    found = _UNREDUCED.search(text)
    return [int(number) for number in found[1].split()] if found else []


def task_mistake(error: BaseException) -> str | None:
    """What a task did wrong: `dtype`, `sparse` (gradient) or `wrapper` (uses the wrapped model); None if unknown."""
    if not isinstance(error, RuntimeError | AttributeError | TypeError):
        return None
    text = next(iter(str(error).splitlines()), "")
    return next((kind for kind, pattern in _TASK_MISTAKES.items() if pattern.search(text)), None)
