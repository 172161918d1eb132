"""The English of docstrings, comments, messages and pages, as far as a program can check it."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from support.architecture import nodes_of
from support.paths import ROOT

# The patterns and the planted cases have the words themselves.
PLANTED = {ROOT / "tests" / "project" / "test_english.py"}
FOLDERS = ("src", "tests", "benchmarks", "examples", "studies")
PROGRAMS = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} - PLANTED)
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


_FRAGMENT = re.compile(r"(Of|For|Those|Whoever|Who)\b")
"""A docstring that begins with one of these seldom becomes a sentence."""
_PHRASES = re.compile(
    r"\b(who waits|whoever|nobody|somebody|told|so many|mend(s|ed|ing)?|breaks a law|in its body)\b", re.IGNORECASE
)
_NAMES = re.compile(r"hears?|heard|tells?|told|telling|mend(s|ed|ing)?|whoever|nobody|somebody")
"""Words that no name has: a program sends, receives, reports and fixes."""
_WITH_S = re.compile(r"[a-z]+(?:is(?:e|es|ed|ing|er|ers)|isations?|lys(?:ed|ing))", re.IGNORECASE)
_SPELLED_WITH_S = """
    advertis advis aris chemis circumcis compromis concis cruis demis despis devis disguis elementwis enterpris excis
    exercis expertis franchis improvis layerwis likewis madvis nois otherwis pairwis pois prais precis premis promis
    rais ris supervis surpris treatis wis
"""
"""Words that American English spells with an s, without their endings."""


def _faults(text: str) -> Iterator[str]:
    yield from (match.group() for match in _PHRASES.finditer(text))
    yield from filter(_is_spelled_with_s, re.findall(r"\b[a-z]+\b", text, re.IGNORECASE))


@cache
def _is_spelled_with_s(word: str) -> bool:
    stem = re.sub(r"(e|es|ed|ing|er|ers|ations?)$", "", word.lower())
    return _WITH_S.fullmatch(word) is not None and stem not in _SPELLED_WITH_S.split()


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


def faults_in_names(nodes: Iterable[ast.AST]) -> list[str]:
    """The names that a module gives and that have a word of `_NAMES` or one spelled with an s, with their lines."""
    found = []
    for node in nodes:
        for name in _given_names(node):
            if _is_faulty(name):
                found.append(f"line {getattr(node, 'lineno', 0)}: {name}")
    return found


@cache
def _is_faulty(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+", name)
    return any(_NAMES.fullmatch(word.lower()) or list(_faults(word)) for word in words)


def faults_in_python(text: str, nodes: Iterable[ast.AST]) -> list[str]:
    """The faults of a module's docstrings, comments and string literals, with their lines."""
    found = []
    for node in nodes:
        if (docstring := _docstring(node)) and (match := _FRAGMENT.match(docstring)):
            found.append(f"a docstring begins with {match.group()}: {docstring.partition(chr(10))[0]}")
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [f"line {node.lineno}: {fault}" for fault in _faults(node.value)]
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.search(r"(?:^|\s)# (.*)", line):
            found += [f"line {number}: {fault}" for fault in _faults(match.group(1))]
    return found


def faults_in(text: str) -> list[str]:
    """All that is wrong in a module."""
    nodes = tuple(ast.walk(ast.parse(text)))
    return faults_in_python(text, nodes) + faults_in_names(nodes)


def test_english_and_names_have_no_known_faults() -> None:
    found = {path: faults_in_markdown(path.read_text()) for path in PAGES}
    found |= {path: faults_in(path.read_text()) for path in PROGRAMS}

    assert {str(path.relative_to(ROOT)): faults for path, faults in found.items() if faults} == {}


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
    assert [text for text in NAMES_WITH_FAULTS if len(faults_in_names(nodes_of(text))) != 1] == []
    assert [text for text in GOOD_NAMES if faults_in_names(nodes_of(text))] == []
    assert [text for text in CODE_WITH_FAULTS if not faults_in_python(text, nodes_of(text))] == []
    assert [text for text in GOOD_CODE if faults_in_python(text, nodes_of(text))] == []


def test_faults_of_a_page_are_outside_of_its_code() -> None:
    assert faults_in_markdown("Nobody waits.\n```\nwhoever\n```\nCall `told` to optimise.") == ["Nobody", "optimise"]
