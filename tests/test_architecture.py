"""What imports what, one way only; no file too long to read; one name for one thing."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("inductor_passes", "simplefsdp")

# Each part may import those above it. Those to ``inductor_passes`` are a package of their own.
ORDER = (
    ("ir",),
    ("transform",),
    ("machine",),
    ("planner",),
    ("adapters",),
    ("executor",),
    ("inductor_passes",),
    ("_torch",),
    ("core",),  # what everybody uses
    ("frontend",),
    ("compiler",),
    ("step",),
    ("simulation",),
    ("pretrained", "checkpoints"),
    ("models", "launcher"),
    ("sweep",),
    ("inspection", "calibrate", "train", "integrations"),  # none of which imports another
    ("simplefsdp", "cli"),
)
COMMANDS = ("cli", "__main__")


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Ours that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{name}: imports by a relative path, which nobody checks"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {other for other in found if other in known} - {name}


def part_of(name: str) -> str:
    package, _, rest = name.partition(".")
    if not rest:
        return package
    first = rest.split(".")[0]
    if (ROOT / package / first).is_dir():
        return first
    if package == "inductor_passes":
        return package
    return "cli" if first in COMMANDS else "core"


KNOWN = modules()
GRAPH = {name: imports(name, path, KNOWN) for name, path in KNOWN.items()}


def test_imports_go_one_way():
    level = {part: i for i, parts in enumerate(ORDER) for part in parts}
    upward = [
        f"{name} imports {other}"
        for name, others in GRAPH.items()
        for other in others
        if part_of(name) != part_of(other) and level[part_of(other)] >= level[part_of(name)]
    ]
    assert not upward


def test_no_module_imports_itself_through_others():
    left = {name: set(others) for name, others in GRAPH.items()}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left  # what is left imports in a circle, or a circle


def test_no_file_is_too_long():
    too_long = {name: n for name, p in KNOWN.items() if (n := len(p.read_text().split("\n"))) > 350}
    assert not too_long


def test_no_two_public_classes_share_a_name():
    names = Counter(
        node.name
        for path in KNOWN.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in names.items() if n > 1] == []


def test_tests_are_in_folders_of_the_code():
    """What is about the whole project, or about one file beside the folders, is beside these."""
    code = {path.parent.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert tests - code == {"benchmarks", "faults"}
