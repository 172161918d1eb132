"""The English of docstrings, comments, messages and pages, as far as a program can check it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from support.paths import ROOT

# The patterns and the planted cases have the words themselves.
PLANTED = {ROOT / "tests" / "project" / "test_english.py"}
FOLDERS = ("src", "tests", "benchmarks", "examples", "studies")
PROGRAMS = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} - PLANTED)
PAGES = sorted([*PROGRAMS, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


_FRAGMENT = re.compile(r"(Of|For|Those|Whoever|Who)\b")
"""A docstring that begins with one of these seldom becomes a sentence."""
_PHRASES = re.compile(
    r"\b(who waits|whoever|nobody|somebody|told|so many|mend(s|ed|ing)?|breaks a law|in its body)\b", re.IGNORECASE
)
_NAMES = re.compile(r"hears?|heard|tells?|told|telling|mend(s|ed|ing)?|whoever|nobody|somebody")
"""Words that no name has: a program sends, receives, reports and fixes."""
_WITH_S = re.compile(r"\b[a-z]+(?:is(?:e|es|ed|ing|er|ers)|isations?|lys(?:ed|ing))\b", re.IGNORECASE)
_SPELLED_WITH_S = """
    advertis advis aris chemis circumcis compromis concis cruis demis despis devis disguis elementwis enterpris excis
    exercis expertis franchis improvis layerwis likewis madvis nois otherwis pairwis pois prais precis premis promis
    rais ris supervis surpris treatis wis
"""
"""Words that American English spells with an s, without their endings."""


def _faults(text: str) -> Iterator[str]:
    yield from (match.group() for match in _PHRASES.finditer(text))
    for match in _WITH_S.finditer(text):
        word = match.group().lower()
        stem = re.sub(r"(e|es|ed|ing|er|ers|ations?)$", "", word)
        if stem not in _SPELLED_WITH_S.split():
            yield match.group()


def faults_in_markdown(text: str) -> list[str]:
    """The faults of a page, without its code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    return list(_faults(prose))


def _docstring(node: ast.AST) -> str | None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node)
    return None


def _given_names(node: ast.AST) -> list[str]:
    """The names that `node` gives to something."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.arg(arg=name) | ast.alias(asname=str(name)):
            return [name]
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return [name]
    return []


def faults_in_names(text: str) -> list[str]:
    """The names that a module gives and that have a word of `_NAMES` or one spelled with an s, with their lines."""
    found = []
    for node in ast.walk(ast.parse(text)):
        for name in _given_names(node):
            words = re.findall(r"[A-Z]?[a-z]+", name)
            if any(_NAMES.fullmatch(word.lower()) or list(_faults(word)) for word in words):
                found.append(f"line {getattr(node, 'lineno', 0)}: {name}")
    return found


def faults_in_python(text: str) -> list[str]:
    """The faults of a module's docstrings, comments and string literals, with their lines."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if (docstring := _docstring(node)) and (match := _FRAGMENT.match(docstring)):
            found.append(f"a docstring begins with {match.group()}: {docstring.partition(chr(10))[0]}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [f"line {node.lineno}: {fault}" for fault in _faults(node.value)]
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.search(r"(?:^|\s)# (.*)", line):
            found += [f"line {number}: {fault}" for fault in _faults(match.group(1))]
    return found


def faults_in(path: Path) -> list[str]:
    text = path.read_text()
    return faults_in_python(text) if path.suffix == ".py" else faults_in_markdown(text)


def test_english_has_no_known_faults() -> None:
    found = {str(path.relative_to(ROOT)): faults for path in PAGES if (faults := faults_in(path))}

    assert found == {}


def test_names_have_no_known_faults() -> None:
    found = {str(path.relative_to(ROOT)): faults for path in PROGRAMS if (faults := faults_in_names(path.read_text()))}

    assert found == {}


NAMES_WITH_FAULTS = [
    "def _tell_earlier(): ...",
    "class LastHeard: ...",
    "class A:\n    def f(self, mend): ...",
    "def f(*whoever): ...",
    "told = 1",
    "for told_norms in x: ...",
    "x.heard = 1",
    "import numpy as nobody",
    "def linearise(): ...",
    "WeightInitialiser = 1",
]
GOOD_NAMES = [
    "def linearize(promises, advised): ...",
    "recommended = stellar = shear = 1",
    "class Noise: ...",
    "x = file.tell()",
    "f(told=1)  # told",
]
CODE_WITH_FAULTS = [
    '"""Of every stage."""',
    'class A:\n    """Those of the stage."""',
    'def f():\n    """For a stage, its rank."""',
    '"""A queue.\n\nWhoever waits is told."""',
    "x = 1  # nobody waits",
    'raise ValueError("expected so many ranks")',
    'f"mend {x} below"',
    'x = "initialised"',
    "# It serialises messages.",
]
GOOD_CODE = [
    '"""Forwards of a stage."""',
    '"""Raises otherwise; a precise and surprising promise of noise."""',
    "whoever = nobody = serialise(told)",
    "# Initializes, materialized, and amends.",
]


def test_planted_faults_are_found_and_good_english_is_none() -> None:
    assert [text for text in NAMES_WITH_FAULTS if len(faults_in_names(text)) != 1] == []
    assert [text for text in GOOD_NAMES if faults_in_names(text)] == []
    assert [text for text in CODE_WITH_FAULTS if not faults_in_python(text)] == []
    assert [text for text in GOOD_CODE if faults_in_python(text)] == []


def test_faults_of_a_page_are_outside_of_its_code() -> None:
    assert faults_in_markdown("Nobody waits.\n```\nwhoever\n```\nCall `told` to optimise.") == ["Nobody", "optimise"]
