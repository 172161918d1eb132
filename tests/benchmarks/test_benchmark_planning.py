"""The benchmark of the planners runs, and its tables say what they claim; the times it measures are not tested."""

import io
import json
from contextlib import redirect_stdout
from typing import Any

import pytest

from support.benchmark_scripts import run_benchmark

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def printed() -> str:
    """Rows as JSON, and then the tables, of VGG-16."""
    options = ["--profiles", "vgg16", "--repeats", "1", "--quick"]
    with redirect_stdout(io.StringIO()) as printed:
        run_benchmark("planning.py", *options)
    return printed.getvalue()


def rows_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.sampled(0)
def test_the_search_is_the_best_of_all_plans_of_a_small_instance(printed: str) -> None:
    assert all(row["wall_min"] <= row["wall_median"] for row in rows_of(printed) if row["table"] == "times")
    rows = [row for row in rows_of(printed) if row["table"] == "small"]
    assert len(rows) == 4
    assert all(row["plans"] > 400 for row in rows)
    # Nothing is better than the best of everything, and for VGG-16 nothing is lost.
    assert all(abs(row[key] - 1) < 1e-3 for row in rows for key in ("search_of_best", "synchronous_of_best"))


def test_the_tables_of_the_papers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_benchmark("planning_papers.py")
    text = capsys.readouterr().out

    assert "SPP, table III" in text
    assert [line for line in text.splitlines() if line.split()[:1] == ["vgg16"] and " 15-1 " in line]
