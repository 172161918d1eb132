"""The texts of all errors that Penstock raises, read from its sources, as a page of Markdown. Imports nothing of it.

python docs/error_index.py [ROOT]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SOURCE = Path("src") / "penstock"
LEAST_WORDS = 3
"""A text of fewer words of its own says nothing without what is put into it."""


class Text(NamedTuple):
    """What an error says, with a … for each part that differs from case to case."""

    kind: str
    text: str
    path: Path
    line: int


def error_texts(root: Path) -> list[Text]:
    """Those of calls such as ``PlanError(f"...")`` and of the advice of rules, by file and line."""
    kinds = _kinds(root / SOURCE / "errors.py")
    return [
        text for path in sorted((root / SOURCE).rglob("*.py")) for text in _in_file(path, path.relative_to(root), kinds)
    ]


def _kinds(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)}


def _in_file(path: Path, shown: Path, kinds: set[str]) -> Iterator[Text]:
    source = path.read_text(encoding="utf-8")
    if "Error(" not in source and ".but(" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=kind), args=[first, *_]) if kind in kinds:
                text = _template(first)
            case ast.Call(func=ast.Attribute(attr="but"), args=[ast.Constant() | ast.JoinedStr() as first, *_]):
                kind, text = "PenstockError", f"…: {_template(first)}"
            case _:
                continue
        if len(re.findall(r"\w{2,}", text)) >= LEAST_WORDS:
            yield Text(kind, re.sub(r"\s+", " ", text).strip(), shown, node.lineno)


def _template(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_template, parts))
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _template(left) + _template(right)
    return "…"


def index(root: Path) -> str:
    """The texts as Markdown, under a heading for each room of the library."""
    rooms: dict[str, list[Text]] = {}
    for text in error_texts(root):
        parts = text.path.relative_to(SOURCE).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else "penstock", []).append(text)
    lines = []
    for room, texts in sorted(rooms.items()):
        lines += [f"## {room}", "", *_purpose(root / SOURCE / room / "__init__.py")]
        for text in sorted(texts, key=lambda text: text.text.lstrip("… ").lower()):
            quoted = text.text.replace("`", "'")
            lines.append(f"- `{quoted}` ({text.kind}, [{text.path.name}](../{text.path.as_posix()}))")
        lines.append("")
    return "\n".join(lines)


def _purpose(package: Path) -> list[str]:
    """The first sentence of a room's docstring, as a paragraph."""
    if not package.exists():
        return []
    sentence = (ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return [" ".join(sentence.split()), ""]


if __name__ == "__main__":
    print(index(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
