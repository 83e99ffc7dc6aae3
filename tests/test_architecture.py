"""The rooms of the house: a module imports only from rooms below its own, and heavy packages only where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "stormo"

# From low to high: a module imports only from its own room and from rooms before it. docs/architecture.md names them.
ROOMS = [
    "errors",
    "version",
    "system",
    "config",
    "telemetry",
    "launch",
    "distributed",
    "data",
    "layers",
    "optim",
    "tasks",
    "energy",
    "profiling",
    "parallel",
    "checkpoint",
    "doctor",
    "training",
    "script",
    "report",
    "study",
    "predict",
    "submit",
    "commands",
    "api",
    "cli",
    "__init__",
    "__main__",
]
# Rooms, and single modules of others, that are imported where torch would make a user wait.
WITHOUT_TORCH = [
    "errors",
    "version",
    "system",
    "config",
    "telemetry",
    "launch",
    "energy",
    "doctor",
    "report",
    "study",
    "submit",
    "commands",
    "api",
    "cli",
    "data.staging",
    "distributed.nccl_probe",
    "training.initial_file",
    "training.settings",
    "training.resume",
]


def room(module: Path) -> str:
    relative = module.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(module: Path) -> set[str]:
    """Every absolute import of a module, wherever in it; those for type checkers alone do not count."""
    found: set[str] = set()
    tree = ast.parse(module.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downward(module: Path) -> None:
    own = room(module)
    assert own in ROOMS, f"{own} is no room: name it here and in docs/architecture.md"
    for name in imports(module):
        parts = name.split(".")
        if parts[0] != "stormo" or len(parts) < 2:
            continue
        other = parts[1] if parts[1] in ROOMS else "__init__"
        assert ROOMS.index(other) <= ROOMS.index(own), f"{module.relative_to(ROOT)} imports {name}, which is above it"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_light_rooms_import_without_torch(name: str) -> None:
    dotted = [
        ".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for module in modules()
    ]
    members = [module for module in dotted if f"{module}.".startswith(f"stormo.{name}.")]
    program = f"import sys, {', '.join(members)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_init_files_hold_docstring_and_imports_only() -> None:
    for module in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            lazy = [PACKAGE / folder / "__init__.py" for folder in (".", "data", "optim")]
            if module in lazy and isinstance(node, ast.If | ast.FunctionDef):
                continue  # `World` and the optimizers need torch, which `stormo --help` must not wait for
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_listing = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            assert is_docstring or is_listing or isinstance(node, ast.ImportFrom | ast.Import), module


def test_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in ROOMS:
        if not name.startswith("__"):
            assert re.search(rf"`{name}(\.py|/)`", page), f"docs/architecture.md does not name {name}"


def test_architecture_page_names_files_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.py)`", page):
        assert (PACKAGE / name).is_file() or (ROOT / name).is_file() or any(PACKAGE.rglob(name)), name


def test_nobody_asks_a_strategy_which_one_it_is() -> None:
    for module in modules():
        text = module.read_text(encoding="utf-8")
        assert not re.search(r"isinstance\([\w.]*strategy,", text), (
            f"{module}: give strategies an attribute or a method"
        )


def test_links_in_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(
            r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL
        )  # code links nowhere
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
            if not re.match(r"[a-z]+:", target):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
