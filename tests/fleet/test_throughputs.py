"""Throughputs are those of the planner's plans, and the files that describe fleets."""

import json

import pytest

from penstock import Cluster, LayerProfile, PlanError, Profile, plan
from penstock.cli import main
from penstock.commands.fleet_command import _OPTIONS
from penstock.fleet import FleetFile, Job, Kind, Machines, ModelJob, max_min_fairness, throughput_table

PROFILE = Profile(
    tuple(
        LayerProfile(f"layer {n}", 1e-3 * (n + 1), 2e-3 * (n + 1), cut_bytes=1e5, saved_bytes=1e6, parameter_bytes=4e6)
        for n in range(4)
    ),
    microbatch_size=8,
)
FAST = Machines(Kind("fast", 4, 3.0), speed=2.0, memory_bytes=1e9, bytes_per_second=1e10)
SLOW = Machines(Kind("slow", 2, 1.0), bytes_per_second=1e9)
ONE = {"schedule": "gpipe", "streamed": False}
"""What makes plans quick."""
TINY = Machines(Kind("tiny", 4, 0.1), memory_bytes=1e6, bytes_per_second=1e9)


def test_throughputs_are_those_of_the_best_plans():
    table = throughput_table(
        [
            ModelJob(Job("wide", 1e6, workers=4), PROFILE, options={"batch_size": 64, **ONE}),
            ModelJob(Job("narrow", 1e6), PROFILE, measured={"slow": 123.0}, options=ONE),
        ],
        [FAST, SLOW, TINY],
    )
    chosen = plan(PROFILE, Cluster.uniform(1, 1e10, 1e9), progress=False, **ONE)
    speeds, reasons = table.throughputs(), [[speed.reason for speed in row] for row in table.speeds]

    assert speeds[1][0] == pytest.approx(2 * chosen.predicted.samples_per_second), "one device, twice as fast"
    assert speeds[1][1] == 123.0 and reasons[1][1] == "measured"
    assert speeds[0][0] > 2 * speeds[1][0], "four devices"
    assert table.speeds[0][0].plan.ranks == 4
    assert reasons[0][1] == "it takes 4 workers, expected at most 2"
    assert speeds[0][2] == speeds[1][2] == 0 and "nothing fits" in reasons[1][2]
    assert "wide on slow: does not run (it takes 4 workers, expected at most 2)" in table.describe()
    assert max_min_fairness(table.problem()).throughputs().min() > 0


def test_a_job_that_fits_nowhere_has_reasons():
    table = throughput_table([ModelJob(Job("big", 10, workers=3), PROFILE, options=ONE)], [SLOW, TINY])
    with pytest.raises(PlanError, match=r"job 'big': expected a kind that it runs on.* slow: it takes 3 workers"):
        table.problem()


FLEET = """
format: penstock-fleet/1
budget: 1e6
kinds:
- {name: V100, workers: 2, price_per_hour: 2.48, workers_per_server: 2, memory_bytes: 16e9, bytes_per_second: 12e9}
- {name: K80, workers: 2, price_per_hour: 0.45, speed: 0.15}
entities:
- {name: team, weight: 2.0, first_come: true}
pairs:
- {jobs: [measured, other], throughputs: {V100: [20, 7.5]}}
jobs:
- name: planned
  steps: 1e5
  workers: 2
  profile: profile.json
  plan: {synchronous: true, schedule: gpipe, microbatches: 4}
  entity: team
- {name: other, steps: 1000, throughputs: {V100: 15, K80: 5}, entity: team, arrives: 60, deadline_seconds: 1e6}
- name: measured
  steps: 1000
  throughputs: {V100: 40, K80: 10}
  entity: team
  command: [train.py, "{directory}", "{steps}"]
"""


@pytest.fixture
def path(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


def test_a_file_describes_a_fleet(path):
    fleet = FleetFile.load(path)
    table = fleet.table()
    problem = fleet.problem(table)

    assert [kind.name for kind in fleet.kinds] == ["V100", "K80"] and fleet.machines[1].speed == 0.15
    assert problem.throughputs[1:] == ((15, 5), (40, 10)) and problem.throughputs[0][0] > problem.throughputs[0][1] > 0
    # The pair is written in another order than the jobs.
    assert problem.pairs[0].jobs == (1, 2) and problem.pairs[0].throughputs == ((7.5, 0), (20, 0))
    assert problem.entities[0].first_come and problem.budget == 1e6
    assert [arrival.seconds for arrival in fleet.workload(table)] == [0, 60, 0]
    assert fleet.commands[:2] == (None, None)
    assert fleet.commands[2].filled("there", 1000, 2) == ["train.py", "there", "1000"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("workers: 2, price", "workers: two, price", "kinds\\[0\\].workers: expected a whole number"),
        ("speed: 0.15", "speed: 0", "kinds\\[1\\].speed: expected a number above 1e-30"),
        ("weight: 2.0", "wait: 2.0", "entities\\[0\\]: unknown key 'wait'"),
        ("profile: profile.json", "profile: missing.json", "jobs\\[0\\].profile: .*no such file"),
        ("throughputs: {V100: 15, K80: 5}, ", "", "jobs\\[1\\]: expected `throughputs`, `profile` or `profiles`"),
        ("V100: [20, 7.5]", "V100: [20]", "pairs\\[0\\]: expected two jobs, and two throughputs"),
        ("[measured, other]", "[measured, nothing]", "pairs: expected names of jobs, found 'nothing'"),
        ("{V100: 15, K80: 5}", "{V100: 15, P100: 5}", "jobs\\[1\\].throughputs: unknown key 'P100'"),
        ("{synchronous: true,", "{synchronic: true,", "jobs\\[0\\].plan: unknown key 'synchronic'"),
        ("name: other", "name: ../other", "jobs\\[1\\].name: expected a name without /"),
        ("arrives: 60", "arrives: -60", "jobs\\[1\\].arrives: expected 0 or more seconds"),
        ("  command: [train", "  processes: {K80: 0}\n  command: [train", "processes.K80: expected 1 or more"),
        ("steps: 1e5", "steps: -1", "jobs\\[0\\].steps: expected a finite number of steps above 0"),
    ],
)
def test_mistakes_in_files_are_named(path, before, after, message):
    path.write_text(FLEET.replace(before, after))
    with pytest.raises(PlanError, match=message):
        fleet = FleetFile.load(path)
        fleet.problem(fleet.table())


def test_commands_print_shares_and_runs(path, capsys):
    assert main(["fleet", "allocate", str(path), "--plans", str(path.parent / "plans")]) == 0
    text = capsys.readouterr().out
    assert main(["fleet", "allocate", str(path), "--policy", "fifo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    page = path.parent / "run.html"
    assert main(["fleet", "simulate", str(path), "--html", str(page), "--policy", "min-cost-with-deadlines"]) == 0
    simulated = capsys.readouterr().out

    assert "planned on V100: " in text and "limited by" in text and "busy workers: V100" in text
    assert (path.parent / "plans" / "planned-V100.yaml").exists()
    assert found["policy"] == "fifo" and [row["job"] for row in found["jobs"]] == ["planned", "other", "measured"]
    assert "3 jobs in" in simulated and "deadlines missed: 0 of 3" in simulated and "<svg" in page.read_text()
    assert main(["fleet", "allocate", str(path), "--policy", "fairness"]) == 1
    assert "Did you mean" in capsys.readouterr().err
    assert main(["fleet", "allocate", str(path), "--html", "page.html"]) == 1
    assert "--html: expected the action simulate or run" in capsys.readouterr().err
    assert main(["fleet", "run", str(path)]) == 1
    assert "--directory: expected a place" in capsys.readouterr().err


OPTIONS = {
    "--round-seconds 5": "simulate run",
    "--html page.html": "simulate run",
    "--restart-seconds 5": "simulate",
    "--prices /no/such.csv": "simulate",
    "--seed 0": "simulate",
    "--ideal": "simulate",
    "--directory run": "run",
    "--grace-seconds 60": "run",
    "--ray auto": "run",
    "--most-failures 3": "run",
}
"""By option, the actions that read it."""


def test_options_of_other_actions_are_refused(path, capsys):
    for option, read_by in OPTIONS.items():
        for action in {"allocate", "simulate", "run"} - set(read_by.split()):
            assert main(["fleet", action, str(path), *option.split()]) == 1
            expected = f"{option.split()[0]}: expected the action {read_by.replace(' ', ' or ')}, found {action}"
            assert expected in capsys.readouterr().err
    assert {option for _, option, *_ in _OPTIONS} == {option.split()[0] for option in OPTIONS}
