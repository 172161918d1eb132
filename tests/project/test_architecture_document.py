"""`docs/architecture.md` agrees with the source: its rooms, its files, and the names that it says are in them."""

import ast
import re
from collections.abc import Iterator

from support.paths import ROOT

DOCUMENT = (ROOT / "docs" / "architecture.md").read_text()
SOURCE = ROOT / "src" / "penstock"


def allowed_imports() -> dict[str, list[str]]:
    """`FLOW` of the architecture test: the rooms, and what each may import."""
    tree = ast.parse((ROOT / "tests" / "project" / "test_architecture.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FLOW":
            return {room: targets.split() for room, targets in ast.literal_eval(node.value).items()}
    raise AssertionError("tests/project/test_architecture.py has no FLOW")


def defined_names(path: str) -> Iterator[str]:
    """The classes and functions of a file, methods as ``Class.method``."""
    for node in ast.parse((SOURCE / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef))


def test_picture_has_every_room_above_those_that_it_imports() -> None:
    picture = next(block for block in re.findall(r"```text\n(.*?)```", DOCUMENT, flags=re.DOTALL) if "pure:" in block)
    groups = [
        (row, re.findall(r"[a-z_.]+", group))
        for row, line in enumerate(picture.splitlines())
        for group in re.split(r"(?<! \+)\s{2,}(?!\+)|\|", line)
    ]
    rows = {room: (row, index) for index, (row, rooms) in enumerate(groups) for room in rooms}
    # `runtime` itself is an empty package around its rooms.
    flow = {room: targets for room, targets in allowed_imports().items() if room != "runtime"}
    broken = [
        f"{room} imports {target}"
        for room, targets in flow.items()
        for target in targets
        if rows[target] != rows[room] and rows[target][0] <= rows[room][0]
    ]

    assert rows.keys() >= flow.keys()
    assert broken == []


def test_files_and_folders_exist() -> None:
    named = re.findall(r"`((?:[\w.]+/)*[\w.]+(?:\.py|/))`", DOCUMENT)
    missing = [name for name in named if not any((folder / name).exists() for folder in (SOURCE, ROOT))]

    assert len(named) > 30
    assert missing == []


def test_names_are_in_their_files() -> None:
    """A name in brackets behind a file is defined in it."""
    named = [
        (path, name)
        for path, names in re.findall(r"`([\w/]+\.py)`\s+\(([^)]*)\)", DOCUMENT)
        for name in re.findall(r"`([\w.]+)`", names)
    ]

    assert len(named) > 20
    assert [(path, name) for path, name in named if name not in defined_names(path)] == []
