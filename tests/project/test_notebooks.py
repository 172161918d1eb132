"""The notebooks run as scripts, and the site shows them with what they print and draw."""

import re
import runpy
from collections.abc import Callable

import pytest

from support.paths import ROOT

NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
NAMES: tuple[str, ...] = NOTEBOOKS["NAMES"]
run: Callable[[str], str] = NOTEBOOKS["run"]


def test_the_page_has_every_notebook() -> None:
    page = (ROOT / "docs" / "notebooks.md").read_text()

    assert re.findall(r"^\| \[(\w+)\.py\]", page, flags=re.MULTILINE) == [*NAMES]
    assert sorted(path.stem for path in (ROOT / "examples" / "notebooks").glob("*.py")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_short_and_begins_with_a_title(name: str) -> None:
    script = (ROOT / "examples" / "notebooks" / f"{name}.py").read_text()

    assert re.match(r"# %% \[markdown\]\n# # [A-Z].*\n#\n# [\w`]", script)
    assert len(script.splitlines()) <= 60


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_shows_its_outputs(name: str) -> None:
    shown = run(name)

    assert shown.startswith("## ")
    assert shown.count("```text\n") >= 1
    assert ("<svg" in shown) == (name in ("schedules", "orders"))


def test_a_cell_shows_what_it_prints_and_its_last_value() -> None:
    execute = NOTEBOOKS["_execute"]
    names: dict[str, object] = {}

    assert execute("x = 2\nprint('x is', x)\nx + 1", names) == ("x is 2\n3\n", "")
    assert execute("x", names) == ("2\n", "")
    drawn = execute("class Drawn:\n    def _repr_svg_(self):\n        return '<svg/>'\n\n\nDrawn()", {})
    assert drawn == ("", "<svg/>")
