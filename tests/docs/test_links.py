"""Every link between the pages leads to a file, and to a heading where it names one."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, read


def _text(page: Path) -> str:
    return re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _text(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", _text(page)):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} in {page.name}: there is no such file"
        assert not anchor or anchor in _anchors(target), f"{link} in {page.name}: there is no such heading"


def test_every_page_can_be_reached() -> None:
    linked = {ROOT / "README.md"}
    for page in PAGES:
        links = re.findall(r"\]\(([^)\s#]+)", _text(page))
        linked |= {(page.parent / link).resolve() for link in links if not link.startswith("http")}
    assert {*PAGES} <= linked


def test_messages_name_pages_that_exist() -> None:
    for module in (ROOT / "stormo").rglob("*.py"):
        for name in re.findall(r"docs/[\w/-]+\.md", read(module)):
            assert (ROOT / name).is_file(), f"{module.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"\b(?:tests|benchmarks|examples)/[\w/]*\w+(?:\.\w+)?", read(page))
    modules = re.findall(r"python -m (benchmarks\.\w+)", read(page))
    for name in named if page.name not in ("architecture.md", "CHANGELOG.md") else []:
        assert (ROOT / name).exists(), f"{page.name} names {name}"
    for module in modules:
        assert importlib.util.find_spec(module), f"{page.name} names {module}"
