"""The sweeps of the thesis's figures: what AlloX's jobs keep, the published names, and a table."""

import json

import pytest

import fleet_figures as figures
from fleets.workloads import thesis_types
from penstock.fleet import Arrival, Job, Kind, allox, simulate_fleet


def test_jobs_that_stay_leave_a_faster_kind_that_becomes_free():
    """`long` begins on the slow kind rather than behind `short`. It moves when `short` ends, or stays."""
    kinds = (Kind("fast", 1), Kind("slow", 1))
    workload = [Arrival(0.0, Job("short", 100), (10.0, 1.0)), Arrival(0.0, Job("long", 100), (1.0, 0.95))]
    moved, stayed = (
        simulate_fleet(workload, kinds, policy, ideal=True).makespan for policy in (allox, figures.Staying(allox))
    )

    # 9.5 steps in the ten seconds of `short`, and the other 90.5 at one a second.
    assert (moved, stayed) == pytest.approx((100.5, 100 / 0.95))


def test_pairs_have_their_published_throughputs(tmp_path):
    types = {each.name: each for each in thesis_types()}
    arrivals = [
        Arrival(0.0, Job(f"{number} {name}", 1.0, workers=workers), types[name].throughputs)
        for number, (name, workers) in enumerate((("LSTM/5", 2), ("A3C/4", 1), ("Recoder/512", 1)))
    ]
    names = [figures.published_type(arrival) for arrival in arrivals]
    (tmp_path / "gavel").mkdir()
    table = {"v100": {"('A3C', 1)": {"null": 3.0, "('Recommendation (batch size 512)', 1)": [1.0, 2.0]}}}
    (tmp_path / "gavel" / "simulation_throughputs.json").write_text(json.dumps(table))
    found = figures.shared_speeds(tmp_path, dict(zip("abc", names, strict=True)), [Kind("V100", 1)])

    assert names == ["('LM (batch size 5)', 2)", "('A3C', 1)", "('Recommendation (batch size 512)', 1)"]
    assert found == {("b", "c"): ((1.0,), (2.0,))}


def test_a_row_of_each_policy_and_group():
    rows = list(figures.rows_of(figures.SWEEPS["priorities"], 5.6, 39, 0, None))

    assert [row[13:30].strip() for row in rows] == [
        f"LAS, {policy}, {group}" for policy in ("aware", "blind") for group in ("high", "low")
    ]
