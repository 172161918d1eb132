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
    """Rows as JSON, and then the tables, of VGG-16 on one server of four."""
    options = ["--profiles", "vgg16", "--machines", "1x4", "--repeats", "1", "--quick"]
    with redirect_stdout(io.StringIO()) as printed:
        run_benchmark("planning.py", *options)
    return printed.getvalue()


def rows_of(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.sampled(0)
def test_every_planner_is_timed_and_judged(printed: str) -> None:
    rows = rows_of(printed)
    assert {row["table"] for row in rows} == {"times", "planners", "small"}
    assert all(row["wall_min"] <= row["wall_median"] for row in rows if "wall_min" in row)
    planned = {row["planner"]: row for row in rows if row["table"] == "planners"}
    assert len(planned) == 12
    assert not [row for row in planned.values() if "refused" in row]
    # No plan is faster than all devices without a pause, and none of the planners beats the search.
    assert all(row["over_bound"] >= 1 - 1e-9 for row in planned.values())
    assert max(row["of_search"] for row in planned.values()) <= 1.001
    tables = printed.partition("PLANNERS")[2]
    assert all(name in tables for name in planned)


@pytest.mark.sampled(0)
def test_the_search_is_the_best_of_all_plans_of_a_small_instance(printed: str) -> None:
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
