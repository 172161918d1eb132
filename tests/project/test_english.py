"""The English of docstrings, comments, messages and pages, as far as a program can check it."""

from pathlib import Path

import pytest

from support.english import faults_in_markdown, faults_in_names, faults_in_python
from support.paths import ROOT

# The patterns and the planted cases have the words themselves.
PLANTED = {ROOT / "tests" / "support" / "english.py", ROOT / "tests" / "project" / "test_english.py"}
FOLDERS = ("src", "tests", "benchmarks", "examples", "studies")
PROGRAMS = sorted({path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")} - PLANTED)
PAGES = sorted([*PROGRAMS, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"])


def faults_in(path: Path) -> list[str]:
    text = path.read_text()
    return faults_in_python(text) if path.suffix == ".py" else faults_in_markdown(text)


def test_english_has_no_known_faults() -> None:
    found = {str(path.relative_to(ROOT)): faults for path in PAGES if (faults := faults_in(path))}

    assert found == {}


def test_names_have_no_known_faults() -> None:
    found = {str(path.relative_to(ROOT)): faults for path in PROGRAMS if (faults := faults_in_names(path.read_text()))}

    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
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
    ],
)
def test_a_fault_in_a_name_is_found(text: str) -> None:
    assert len(faults_in_names(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def linearize(promises, advised): ...",
        "recommended = stellar = shear = 1",
        "class Noise: ...",
        "x = file.tell()",
        "f(told=1)  # told",
    ],
)
def test_a_good_name_is_no_fault(text: str) -> None:
    assert faults_in_names(text) == []


@pytest.mark.parametrize(
    "text",
    [
        '"""Of every stage."""',
        'class A:\n    """Those of the stage."""',
        'def f():\n    """For a stage, its rank."""',
        '"""A queue.\n\nWhoever waits is told."""',
        "x = 1  # nobody waits",
        'raise ValueError("expected so many ranks")',
        'f"mend {x} below"',
        'x = "initialised"',
        "# It serialises messages.",
    ],
)
def test_a_fault_in_code_is_found(text: str) -> None:
    assert faults_in_python(text) != []


@pytest.mark.parametrize(
    "text",
    [
        '"""Forwards of a stage."""',
        '"""Raises otherwise; a precise and surprising promise of noise."""',
        "whoever = nobody = serialise(told)",
        "# Initializes, materialized, and amends.",
    ],
)
def test_good_english_in_code_is_no_fault(text: str) -> None:
    assert faults_in_python(text) == []


def test_faults_of_a_page_are_outside_of_its_code() -> None:
    assert faults_in_markdown("Nobody waits.\n```\nwhoever\n```\nCall `told` to optimise.") == ["Nobody", "optimise"]
