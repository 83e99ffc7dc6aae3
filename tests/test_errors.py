"""Words that errors are made of."""

from __future__ import annotations

import pytest

from stormo.errors import pluralize


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "sample", "0 samples"),
        (1, "worker", "1 worker"),
        ("1", "epoch", "1 epoch"),
        (2, "pass", "2 passes"),
        (3, "batch", "3 batches"),
        ("0.5", "epoch", "0.5 epochs"),
        ("1 + 1", "sample", "1 + 1 samples"),
    ],
)
def test_a_number_with_what_it_counts(count: int | str, noun: str, text: str) -> None:
    assert pluralize(count, noun) == text
