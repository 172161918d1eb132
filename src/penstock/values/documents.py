"""Reads files that people edit, with errors that say where each mistake is.

Profiles, clusters and plans are small files that people change by hand and make mistakes in. A `YamlNode` holds the
file, the path inside it (``layers[3].cut_bytes``) and the value there, so that an error can give all three and the fix.

Rules of this file:
  1. It handles the structure of JSON and YAML only, and does not depend on profiles, clusters or plans.
  2. A key that is unknown, missing or repeated is an error; nothing is ignored.
"""

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from penstock.arguments import PATH, text_of
from penstock.errors import PenstockError, suggestion

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A node of a file: its value, where it is, and the class of its errors."""

    file: str
    where: str
    value: object
    error: type[PenstockError]
    kind: str = ""
    """What the whole file is by its text, such as ``a plan``; empty if that is not known."""

    def fail(self, expected: str, fix: str) -> NoReturn:
        """Raises the file's error: where, `expected`, what was found, `fix`."""
        raise self.error(f"{self._head()}expected {expected}, found {text_of(self.value)}: {fix}")

    def mapping(self, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, "YamlNode"]:
        """The nodes of a mapping with these keys and no others."""
        if not isinstance(self.value, dict):
            self.fail(f"a mapping with the keys {', '.join(required)}", "write `key: value` pairs here")
        known = (*required, *optional)
        for key in self.value:
            if key not in known:
                raise self.error(
                    f"{self._head()}unknown key {key!r}: expected {', '.join(known)}. "
                    f"{suggestion(str(key), known)}Rename or remove it"
                )
        for key in required:
            if key not in self.value:
                raise self.error(
                    f"{self._head()}the key {key!r} is missing: expected {', '.join(required)}, "
                    f"found {', '.join(map(str, self.value)) or 'nothing'}. Add it"
                )
        return {str(key): self._inside(f".{key}", value) for key, value in self.value.items()}

    def items(self) -> tuple["YamlNode", ...]:
        """The nodes of a list."""
        if not isinstance(self.value, list):
            self.fail("a list", "write the entries as a list")
        return tuple(self._inside(f"[{index}]", value) for index, value in enumerate(self.value))

    def integer(self) -> int:
        """A whole number."""
        value = self._number()
        if value is None or (isinstance(value, float) and not value.is_integer()):
            self.fail("a whole number", "write one in decimal digits, without quotes")
        return int(value)

    def number(self) -> float:
        """A number, or NaN, which the value built from it must reject."""
        value = self._number()
        if value is None:
            self.fail("a number", "write one, without quotes")
        return value

    def integers(self) -> tuple[int, ...]:
        """A list of whole numbers."""
        return tuple(node.integer() for node in self.items())

    def numbers(self) -> tuple[float, ...]:
        """A list of numbers."""
        return tuple(node.number() for node in self.items())

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            self.fail("text", "put it in quotes")
        return self.value

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self.fail("true or false", "write one of the two, without quotes")
        return self.value

    def build(self, make: Callable[[], Value]) -> Value:
        """The result of `make`; an error that it raises is prefixed with the file and path of this node."""
        try:
            return make()
        except self.error as error:
            if self.file and str(error).startswith(f"{self.file}: "):
                raise
            message = str(error)
            head = f"{self.file}: {self.where}" if self.where else f"{self.file}: "
            raise self.error(f"{head}{'.' if self.where else ''}{message}") from None

    def check_format(self, tag: str) -> None:
        """Raises the file's error unless ``format`` of this mapping is `tag`."""
        found = self.value.get("format") if isinstance(self.value, dict) else None
        if found == tag:
            return
        wanted = kind_of(f"format: {tag}")
        if self.kind not in ("", wanted):
            raise self.error(f"{self.file}: expected {wanted}, found {self.kind}: {_OTHER_KIND}")
        raise self.error(
            f"{self.file}: format: expected {tag!r}, found {text_of(found)}: it is {wanted} of another version of "
            f"Penstock, or another kind of file. If it is the right one, write `format: {tag}` into it"
        )

    def found(self, value: object, own_kind: str) -> str:
        """What an error says was found: `value`, or the kind of this file if it is known and not `own_kind`."""
        return text_of(value) if self.kind in ("", own_kind) else self.kind

    def _number(self) -> float | None:
        if isinstance(self.value, int | float) and not isinstance(self.value, bool):
            return self.value
        return None

    def _inside(self, step: str, value: object) -> "YamlNode":
        return YamlNode(self.file, f"{self.where}{step}".removeprefix("."), value, self.error)

    def _head(self) -> str:
        return f"{self.file}: {self.where}: " if self.where else f"{self.file}: "


_OTHER_KIND = "give another file, or exchange it with another argument"
INDEX_KIND, TRACE_KIND = "an index of weights", "a trace"
_KINDS = (
    (r"""^[{\s]*["']?format["']?\s*:\s*["']?penstock-([a-z-]+?)[-/]\d""", ""),
    ('"traceEvents":', TRACE_KIND),
    ('"weight_map":', INDEX_KIND),
    (r"^node\d+ -- ", "a graph of PipeDream's profiler"),
    (r"^seconds,kind,price", "prices over time"),
    (r"^(from|import|def) ", "a Python file"),
)
"""How the kinds of files begin a line, and their names; with ``format`` the name is in the file."""


def kind_of(text: str) -> str:
    """What a file with this text is, such as ``a plan``; empty if that is not known."""
    for pattern, name in _KINDS:
        if found := re.search(pattern, text, re.MULTILINE):
            return name or f"a {found[1]}"
    return ""


def read_known(nodes: Mapping[str, YamlNode], readers: Mapping[str, Callable[[YamlNode], Any]]) -> dict[str, Any]:
    """What the file has of the fields in `readers`, each read by its reader."""
    return {name: read(nodes[name]) for name, read in readers.items() if name in nodes}


def read_json(path: str | Path, error: type[PenstockError]) -> YamlNode:
    """The whole of a JSON file; `error` if it is missing or broken."""
    return _read(path, error, lambda text: json.loads(text, object_pairs_hook=_unique_pairs))


def read_yaml(path: str | Path, error: type[PenstockError]) -> YamlNode:
    """The whole of a YAML file; `error` if it is missing or broken."""
    return _read(path, error, _load_yaml)


def _load_yaml(text: str) -> object:
    return yaml.load(text, Loader=_UniqueLoader)


def write_text(path: str | Path, text: str, error: type[PenstockError]) -> None:
    """Writes `text`; `error` if the file cannot be written."""
    PATH.check("path", path, error)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as failure:
        raise error(f"{path}: cannot be written: {failure.strerror}. Give another path") from None


def number_text(value: float) -> str:
    """`value` as YAML 1.1 reads it back exactly."""
    text: str = yaml.safe_dump(value).split("\n", 1)[0]
    return text


def quoted_text(value: str) -> str:
    """`value` on one line, as YAML reads it back exactly."""
    text: str = yaml.safe_dump(value, default_style='"', width=float("inf"))
    return text.rstrip("\n")


def read_text(path: str | Path, error: type[PenstockError], expected: str = "") -> str:
    """The whole of a text file; `error` if it cannot be read, or is known to be another kind than `expected`."""
    PATH.check("path", path, error)
    try:
        text = Path(path).read_text(encoding="utf-8")
        if expected and (kind := kind_of(text)) not in ("", expected):
            raise error(f"{path}: expected {expected}, found {kind}: {_OTHER_KIND}")
        return text
    except FileNotFoundError:
        directory = Path(path).parent
        there = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
        raise error(f"{path}: no such file. {suggestion(Path(path).name, there)}Check the path") from None
    except (OSError, UnicodeDecodeError) as failure:
        raise error(f"{path}: cannot be read: {failure}. Give a readable text file") from None


def _read(path: str | Path, error: type[PenstockError], parse: Callable[[str], object]) -> YamlNode:
    """What `parse` makes of the text of a file."""
    text = read_text(path, error)
    kind = kind_of(text)
    try:
        return YamlNode(str(path), "", parse(text), error, kind)
    except json.JSONDecodeError as broken:
        if "\nformat: penstock-" in f"\n{text}":
            # A file of ours that is written in YAML: its reader says what it is.
            return _read(path, error, _load_yaml)
        found = f"line {broken.lineno}, column {broken.colno}: not JSON: {broken.msg}. Correct it there"
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        found = f"{line}not YAML: {broken.problem}. Correct it there"
    except yaml.YAMLError as broken:
        found = f"not YAML: {broken}. Correct it there"
    except _WrittenTwice as twice:
        found = f"{twice}. Remove one"
    except RecursionError:
        found = "lists or mappings inside of each other, to a depth that cannot be read. Write fewer levels"
    except ValueError as broken:
        found = f"a value that cannot be read: {broken}. Correct it"
    raise error(f"{path}: {found}{f' if {kind} is what you meant to give' if kind else ''}") from None


class _WrittenTwice(Exception):
    """Raised if a mapping repeats a key; JSON and YAML would silently keep the last value."""


class _UniqueLoader(yaml.SafeLoader):
    """A safe loader that raises `_WrittenTwice` if a mapping repeats a key, and reads numbers as YAML 1.2 does.

    In YAML 1.1, which PyYAML reads, 8:30 is 510, 010 is 8, and 12e9 is text: each is another value than its author
    means, so the first two are text here, which is no number, and the last is one.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise _WrittenTwice(f"line {key_node.start_mark.line + 1}: the key {key_node.value!r} is written twice")
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9]*)$",
    "tag:yaml.org,2002:float": r"([-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$",
}
_UniqueLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in _NUMBERS.items():
    _UniqueLoader.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


def _unique_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict[str, object]()
    for key, value in pairs:
        if key in found:
            raise _WrittenTwice(f"the key {key!r} is written twice")
        found[key] = value
    return found
