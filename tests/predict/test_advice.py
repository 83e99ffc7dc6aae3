"""Every branch of the advice."""

from __future__ import annotations

import pytest

from stormo.predict.advice import Outcome, Question, advise

YES = Outcome(fits=True, batch=8, largest_micro_batch=8)
SMALLER = Outcome(fits=False, batch=8, largest_micro_batch=3)
NO = Outcome(fits=False, batch=8, largest_micro_batch=0)
ONE = ("single", "single, recomputed", "offload", "offload, recomputed")
AGAIN = ("ddp, recomputed", "ddp, recomputed -")
NODE = ("ddp", "zero2", "ddp -", "fsdp", "fsdp -", *AGAIN, "fsdp, recomputed", "fsdp, recomputed -", "zero2 -")
OFFLOAD = ("offload", "offload -", "offload, recomputed", "offload, recomputed -")
MANY = ("hsdp, recomputed", "hsdp, recomputed -")


def ask(
    fitting: dict[str, Outcome], num_gpus: int, num_nodes: int, nvlink: bool, fast: bool, needed: int | None
) -> str:
    keys = [
        *ONE,
        *("ddp", "ddp, recomputed", "zero1", "zero2", "fsdp", "fsdp, recomputed", "tensor", "pipeline"),
        *("hsdp", "hsdp, recomputed"),
    ]
    found = advise(
        Question(
            num_gpus=num_gpus,
            num_nodes=num_nodes,
            has_nvlink=nvlink,
            is_fast=fast,
            outcomes={key: fitting.get(key, NO) for key in keys},
            gpus_needed=needed,
        )
    )
    assert (found.accumulate == 1) == (found.key is None or fitting[found.key] is YES)
    assert found.accumulate in (1, 4)  # 8 samples in micro-batches of at most 3: four of 2
    return found.text if found.key is None else found.key + " -" * (found.accumulate > 1)


@pytest.mark.parametrize(
    ("order", "num_gpus", "num_nodes", "nvlink", "fast"),
    [
        (("single", "single -", "single, recomputed", "single, recomputed -", *OFFLOAD), 1, 1, False, True),
        ((*NODE, "tensor", "tensor -", "pipeline", "pipeline -", *OFFLOAD), 4, 1, True, True),
        ((*NODE, "pipeline", "pipeline -", "tensor", "tensor -", *OFFLOAD), 4, 1, False, True),
        (
            (
                *("ddp", "zero2", "ddp -", "hsdp", "hsdp -", *AGAIN, *MANY, "fsdp", "fsdp -"),
                *("fsdp, recomputed", "fsdp, recomputed -", "pipeline", "pipeline -", "tensor", "tensor -", *OFFLOAD),
            ),
            *(4, 2, True, True),
        ),
        (
            (
                *("ddp", "ddp -", "zero1", "zero1 -", *AGAIN, "hsdp", "hsdp -", *MANY),
                *("pipeline", "pipeline -", "tensor", "tensor -"),
                *("fsdp", "fsdp -", "fsdp, recomputed", "fsdp, recomputed -", *OFFLOAD),
            ),
            *(4, 2, True, False),
        ),
    ],
    ids=["one GPU", "one node with NVLink", "one node", "a fast network", "a slow network"],
)
def test_the_first_candidate_that_fits_is_taken(
    order: tuple[str, ...], num_gpus: int, num_nodes: int, nvlink: bool, fast: bool
) -> None:
    for place, wanted in enumerate(order):
        fitting = {}
        for name in reversed(order[place:]):
            fitting[name.removesuffix(" -")] = SMALLER if name.endswith(" -") else YES
        assert ask(fitting, num_gpus, num_nodes, nvlink, fast, None) == wanted


def test_where_nothing_fits_the_advice_says_what_would() -> None:
    assert "24 GPUs of this kind" in ask({}, 8, 1, True, True, 24)
    assert ask({}, 8, 1, True, True, 0) == "nothing fits."
    assert "more GPUs of this kind would not help" in ask({}, 8, 1, True, True, None)


def test_what_was_set_is_taken_if_it_fits() -> None:
    outcomes = {"ddp": YES, "fsdp": YES, "zero1": NO, "as set": SMALLER}

    def taken(asked: str | None) -> tuple[str | None, int, str]:
        question = Question(num_gpus=2, num_nodes=1, has_nvlink=False, is_fast=True, outcomes=outcomes, asked=asked)
        found = advise(question)
        return found.key, found.accumulate, found.text

    assert taken(None) == ("ddp", 1, "every GPU can hold a copy.")
    assert taken("fsdp") == ("fsdp", 1, "it fits as set.")
    assert taken("as set") == ("as set", 4, "it fits as set in 4 micro-batches of 2 samples.")
    assert taken("zero1") == ("ddp", 1, "the strategy set does not fit; every GPU can hold a copy.")
    assert taken("pipeline") == ("ddp", 1, "the strategy set is not possible; every GPU can hold a copy.")
