"""Each recipe is a plain script with few lines changed, and prints the same losses."""

import os
import re
import runpy

import pytest

import recipes
from support.fork_server import ForkServer
from support.paths import ROOT

LOSS = re.compile(r"loss ([\d.]+), ")


def test_the_page_has_all_and_the_site_their_differences() -> None:
    source = [(ROOT / "docs" / "recipes.md").read_text()]
    row = re.compile(r"^\| \[(\w+)\]\(.*plain/(\w+)\.py\) \| \[(\w+)\]\(.*pipelined/(\w+)\.py\)", re.MULTILINE)
    found = row.findall(source[0])
    runpy.run_path(str(ROOT / "docs" / "conf.py"))["add_recipes"](None, "docs/recipes", source)

    assert found == [(name,) * 4 for name in recipes.NAMES]
    assert source[0].endswith(f"\n\n{recipes.page()}")


@pytest.mark.parametrize("name", recipes.NAMES)
def test_few_lines_are_added(name: str) -> None:
    added = [line for line in recipes.changes(name).splitlines() if line.startswith("+")]

    assert 0 < len(added) <= 8


@pytest.mark.sampled(1)
@pytest.mark.processes
# The first is the one that the suite runs: the fork server has imported all that it needs.
@pytest.mark.parametrize("name", sorted(recipes.NAMES, key=lambda name: name != "text"))
def test_losses_are_those_of_the_plain_script(fork_server: ForkServer, name: str) -> None:
    if name not in recipes.INSTALLED:
        pytest.skip(f"{recipes.NEEDED[name]} is not installed")
    plain = fork_server.start([f"examples/recipes/plain/{name}.py", "--steps", "2"], dict(os.environ), ROOT)
    ranks = fork_server.start_ranks([f"examples/recipes/pipelined/{name}.py", "--steps", "2"], 2, ROOT)
    printed = [child.communicate(timeout=240) for child in (plain, *ranks)]

    assert [child.returncode for child in (plain, *ranks)] == [0, 0, 0], printed
    expected, *found = ([float(loss) for loss in LOSS.findall(text)] for text, _ in printed)
    assert len(expected) == 2
    for losses in found:
        # Models of transformers compute their loss in single precision.
        assert losses == pytest.approx(expected, rel=1e-6)
