"""The page of promises and the table in README.md say what is stored, and every command that they name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import promises

PROMISES = promises.read_promises()


def test_the_page_is_what_is_stored() -> None:
    assert promises.PAGE.read_text(encoding="utf-8") == promises.page(PROMISES), "python -m benchmarks.promises"


def test_the_readme_has_the_eight_that_matter_most() -> None:
    rows = [promises.row(one) for one in PROMISES if one["in_readme"]]
    assert len(rows) == 8
    assert "\n".join(rows) in (promises.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: str(promise["key"]))
def test_commands_exist(promise: dict[str, list[str]]) -> None:
    for command in promise["commands"]:
        words = command.split()
        if words[0] == "pytest":
            files = [Path(word) for word in words[1:]]
        else:
            assert words[:2] == ["python", "-m"]
            files = [Path(words[2].replace(".", "/")).with_suffix(".py")]
        assert all((promises.ROOT / file).exists() for file in files)


def test_a_run_stores_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    promise = {"key": "x", "promise": "x", "commands": ["python -c 'print(1); print(\"RESULT a=2\")'"]}
    monkeypatch.setattr(promises, "_commit", lambda: "abc")
    promises.run(promise)
    assert promise["results"] == ["RESULT a=2"]
    assert promise["commit"] == "abc"
    with pytest.raises(SystemExit, match="nothing was stored"):
        promises.run({"commands": ["python -c 'raise SystemExit(3)'"]})
