"""The benchmark of the planners runs, and its tables say what they claim; the times it measures are not tested."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
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


def test_measured_plans_stand_beside_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers of 1 + 2 s and 0.5 s of an update, 1 MB between them and 2 MB of weights each, links of 1 MB/s.

    Two stages: messages block for a second at either end, so that stage 0 ends its backwards at 8 and at 13 s. Two
    replicas: 6 s, then 4 s of the ring. One GPU: 12 s. One plan is not what it says, and is left out.
    """
    gpu = ["A", 1]
    one = {"name": "two stages", "model": "M", "cuts": [1, 1], "nodes": [[gpu], [gpu]], "mbs": 1, "gbs": 2}
    plans = [
        one | {"seconds": 13.5, "bytes": 1e9},
        one | {"name": "replicas", "cuts": [2], "nodes": [[gpu, gpu]], "seconds": 22.0, "bytes": 1e9},
        one | {"name": "alone", "cuts": [2], "nodes": [[gpu]], "seconds": 12.5, "bytes": 1e9},
        one | {"name": "OPT-350/N4/N4_D4"},
    ]
    layers = {"times": {"M/A/1/1": [[1, 2, 0.5]] * 2}, "memory": {"M/1": [[500_000, 250_000, 0]] * 2}}
    (tmp_path / "sailor").mkdir()
    record = {"plans": plans, **layers, "links": {"A/1/A/1": [1, 1, 1e-3]}}
    (tmp_path / "sailor" / "sailor.json").write_text(json.dumps(record))
    run_benchmark("sailor.py", "--data", str(tmp_path))
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]

    assert rows[1][:5] == ["two", "stages", "13.5000", "13.5000", "+0.0%"]
    assert rows[2][:4] == ["replicas", "22.0000", "11.0000", "-50.0%"]
    # Beside the context 24 bytes for each of 500,000 and 1,000,000 parameters.
    assert [row[-2] for row in rows[1:3]] == ["5.07", "5.08"]
    said = "seconds off by 18.00% in the mean, 4.00% in the median; 0 of 1 pairs in the right order, 0 of 1 winners"
    assert " ".join(rows[5]) == said
