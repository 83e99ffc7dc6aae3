"""What the lines of the machines' charts are called."""

from __future__ import annotations

import pytest

from stormo.report.machines import _by_name


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("memory_used_bytes", ["GPU 0 slice 0", "GPU 0 slice 1", "GPU 1"]),
        ("power_w", ["GPU 0", "GPU 1"]),  # of the whole GPU, once
    ],
)
def test_slices_have_lines_of_their_own_where_they_have_figures(key: str, names: list[str]) -> None:
    gpus = [{"index": 0, "uuid": "MIG-a"}, {"index": 0, "uuid": "MIG-b"}, {"index": 1, "uuid": "GPU-c"}]
    assert list(_by_name(gpus, key)) == names
