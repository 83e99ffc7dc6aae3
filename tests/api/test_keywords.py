"""The keywords of `stormo.train` are the flags of `stormo train`."""

from __future__ import annotations

import os
from pathlib import Path

from stormo.api import keywords
from stormo.api.start import NOT_KEYWORDS
from stormo.config.schema import SECTIONS

FILE = Path(keywords.__file__)


def _text() -> str:
    """The module; UPDATE_GOLDEN=1 writes it."""
    lines = [
        '"""The keywords of `stormo.train`, for editors and type checkers; a test makes this file from the schema."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Literal, TypedDict",
        "",
        "from stormo.config.schema import Precision, Schedule",
        "from stormo.config.strategies import StrategyName",
        "",
        "",
        "class TrainSettings(TypedDict, total=False):",
        '    """Every flag of `stormo train`, with underscores."""',
    ]
    for section, cls in SECTIONS.items():
        lines += ["", f"    # {section}"]
        for name, hint in cls.__annotations__.items():
            if name in NOT_KEYWORDS:
                continue
            kinds = [kind.replace("'", '"') for kind in hint.split(" | ") if kind not in ("NodeRange", "None")]
            if cls.__dataclass_fields__[name].metadata["optional_value"]:
                kinds.append("Literal[True]")
            lines.append(f"    {name}: {' | '.join([*kinds, 'None'])}")
    return "\n".join([*lines, ""])


def test_every_flag_is_a_typed_keyword() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        FILE.write_text(_text(), encoding="utf-8")
    assert FILE.read_text(encoding="utf-8") == _text()
