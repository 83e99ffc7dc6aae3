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

# A room's number is its floor; docs/architecture.md draws the same picture.
FLOORS = {
    "cache": 2,
    "masking": 0,
    "errors": 0,
    "hardware": 0,
    "process": 0,
    "files": 1,
    "early_signals": 1,
    "nvml": 1,
    "mesh": 1,
    "config": 1,
    "layout": 2,
    "plan": 2,
    "options": 2,
    "telemetry": 2,
    "energy": 2,
    "vitals": 3,
    "keeper": 3,
    "launch": 2,
    "divergence": 3,
    "nodes": 3,
    "resuming": 3,
    "hosts": 3,
    "data": 3,
    "layers": 3,
    "optim": 3,
    "world": 3,
    "measuring": 4,
    "tasks": 4,
    "pipeline": 4,
    "profiling": 4,
    "strategies": 5,
    "staging": 5,
    "metrics": 6,
    "checkpoint": 6,
    "progress": 6,
    "loss_parts": 6,
    "losses": 7,
    "out_of_memory": 7,
    "rehearsal": 7,
    "stopwatch": 7,
    "state": 7,
    "dry_run": 8,
    "loop": 8,
    "journal": 8,
    "summary": 8,
    "recovery": 8,
    "worker": 9,
    "script": 8,
    "train": 9,
    "run": 9,
    "new": 9,
    "templates": 9,
    "runs": 9,
    "show": 9,
    "export": 9,
    "monitor": 9,
    "doctor": 9,
    "report": 9,
    "scale": 9,
    "predict": 9,
    "submit": 9,
    "cli": 10,
    "__main__": 11,
    "__init__": 11,
}
# Neighbours on one floor that may be imported, and only in this direction.
SIDEWAYS = {
    *(("plan", "layout"), ("train", "worker"), ("recovery", "journal"), ("journal", "summary")),
    *(("show", "runs"), ("report", "runs"), ("scale", "train"), ("submit", "train"), ("submit", "runs")),
    *(("worker", "doctor"), ("train", "doctor"), ("predict", "train")),
}
WITHOUT_TORCH = {
    *(
        "cache",
        "masking",
        "errors",
        "files",
        "hardware",
        "nvml",
        "process",
        "early_signals",
        "mesh",
        "config",
        "layout",
        "plan",
        "options",
        "telemetry",
        "launch",
    ),
    *("nodes", "hosts", "energy", "vitals", "keeper", "monitor", "report", "scale", "submit", "doctor", "staging"),
    *("dry_run", "resuming", "runs", "show", "export", "new", "cli"),
    "train",  # which is also what the agent of a node runs
}


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
    assert own in FLOORS, f"{own} has no floor: add it here and in docs/architecture.md"
    for name in imports(module):
        parts = name.split(".")
        if parts[0] != "stormo" or len(parts) < 2:
            continue
        other = parts[1] if parts[1] in FLOORS else "__init__"
        if other == own or (own, other) in SIDEWAYS or name == "stormo.__version__":
            continue
        assert FLOORS[other] < FLOORS[own], f"{module.relative_to(ROOT)} imports {name}, which is not below it"


@pytest.mark.parametrize("name", sorted(WITHOUT_TORCH))
def test_light_rooms_import_without_torch(name: str) -> None:
    members = [module for module in modules() if room(module) == name]
    dotted = [".".join(module.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for module in members]
    program = f"import sys, {', '.join(dotted)}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_init_files_hold_docstring_and_imports_only() -> None:
    for module in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            lazy = (PACKAGE / "__init__.py", PACKAGE / "optim" / "__init__.py")
            if module in lazy and isinstance(node, ast.If | ast.FunctionDef):
                continue  # `World` and the optimizers need torch, which `stormo --help` must not wait for
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            is_listing = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            assert is_docstring or is_listing or isinstance(node, ast.ImportFrom | ast.Import), module


def test_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in FLOORS:
        if not name.startswith("__"):
            assert re.search(rf"`{name}(\.py|/)`", page), f"docs/architecture.md does not name {name}"


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
