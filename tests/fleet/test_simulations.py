"""The simulator on workloads that can be computed by hand, and its laws."""

import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from fleets.baselines import blind
from fleets.workloads import THESIS_KINDS, poisson_workload, static_workload, thesis_types
from penstock import PlanError
from penstock.fleet import (
    Allocation,
    Arrival,
    Job,
    Kind,
    PriceHistory,
    Problem,
    completion_svg,
    devices_svg,
    finish_time_fairness,
    max_min_fairness,
    min_cost,
    min_cost_near_deadlines,
    min_cost_with_deadlines,
    min_makespan,
    min_makespan_within_budget,
    run_page,
    simulate_fleet,
    strict_fifo,
)

GPU = (Kind("GPU", 1, 3.6),)


def arrivals(*steps: float, speed: float = 1.0) -> list[Arrival]:
    """Jobs that are all there at the start."""
    return [Arrival(0.0, Job(f"job {m}", count), (speed,)) for m, count in enumerate(steps)]


def test_one_job_takes_its_steps_and_one_restart():
    run = simulate_fleet(arrivals(1000, speed=2.0), GPU, max_min_fairness, round_seconds=100, restart_seconds=5)
    (job,) = run.jobs

    assert (job.finished, job.busy_seconds, job.restarts) == (505, 505, 0)
    assert job.cost == pytest.approx(0.505)
    assert job.isolated_seconds == 500 and run.makespan == 505


def test_two_jobs_take_turns_and_pay_for_each_restart():
    """Rounds of 100 s, of which each turn loses 5 s: 190 steps take two rounds each, the first and third, and the
    second and fourth.
    """
    run = simulate_fleet(arrivals(190, 190), GPU, max_min_fairness, round_seconds=100, restart_seconds=5)

    assert [(job.job.name, job.finished, job.restarts) for job in run.jobs] == [("job 0", 300, 1), ("job 1", 400, 1)]
    assert [job.isolated_seconds for job in run.jobs] == [380, pytest.approx(2 * 95 + 95)]


def test_restarts_that_take_longer_than_a_round_end_nonetheless():
    """A restart takes two and a half rounds, and each lease lasts three: 50 s of training in each."""
    run = simulate_fleet(arrivals(100, 100), GPU, max_min_fairness, round_seconds=100, restart_seconds=250)

    assert [(job.finished, job.restarts) for job in run.jobs] == [(900, 1), (1200, 1)]


def test_restarts_differ_by_kind():
    """A job on each kind: 100 steps of a second each, after 10 s and 40 s."""
    kinds = (Kind("quick", 1), Kind("slow", 1))
    workload = [Arrival(0.0, Job("a", 100), (1.0, 0.0)), Arrival(0.0, Job("b", 100), (0.0, 1.0))]
    run = simulate_fleet(workload, kinds, max_min_fairness, restart_seconds={"quick": 10, "slow": 40})

    assert {job.job.name: job.finished for job in run.jobs} == {"a": 110, "b": 140}
    with pytest.raises(
        PlanError, match="of kind 'slow': expected a finite number of seconds, 0 or more, found nothing"
    ):
        simulate_fleet(workload, kinds, max_min_fairness, restart_seconds={"quick": 10})


def test_strict_fifo_runs_one_after_the_other():
    run = simulate_fleet(arrivals(150, 150), GPU, strict_fifo, round_seconds=100, restart_seconds=0)

    assert [(job.finished, job.restarts) for job in run.jobs] == [(150, 0), (350, 0)], "a round is not divided"


def test_ideal_shares_need_no_rounds():
    run = simulate_fleet(arrivals(100, 200), GPU, max_min_fairness, ideal=True)

    assert [job.finished for job in run.jobs] == pytest.approx([200, 300])
    assert [job.cost for job in run.jobs] == pytest.approx([0.1, 0.2])


def test_jobs_wait_for_the_next_round_after_their_arrival():
    workload = [Arrival(30.0, Job("a", 50), (1.0,)), Arrival(1000.5, Job("b", 50), (1.0,))]
    run = simulate_fleet(workload, GPU, max_min_fairness, round_seconds=100, restart_seconds=0)

    assert [(job.arrived, job.finished) for job in run.jobs] == [(30, 150), (1000.5, 1150)]


def test_only_watched_jobs_count():
    run = simulate_fleet(arrivals(50, 50, 5000), GPU, strict_fifo, round_seconds=100, watched=range(1, 2))

    assert [job.job.name for job in run.jobs] == ["job 1"]


def small_workload():
    return poisson_workload(thesis_types(), 20, 12.0, seed=1)


KINDS = tuple(Kind(name, 2, price) for name, price in zip(THESIS_KINDS, (2.48, 1.46, 0.45), strict=True))


def test_rounds_are_close_to_ideal_shares():
    rounds = simulate_fleet(small_workload(), KINDS, max_min_fairness, restart_seconds=0, round_seconds=1800)
    ideal = simulate_fleet(small_workload(), KINDS, max_min_fairness, ideal=True)

    # A job that ends within a round leaves its workers idle until the next one: half an hour where jobs take many.
    assert rounds.mean_seconds == pytest.approx(ideal.mean_seconds, rel=0.1)
    assert len(rounds.jobs) == len(ideal.jobs) == 20


def test_aware_policies_beat_blind_ones():
    runs = [
        simulate_fleet(small_workload(), KINDS, policy, ideal=True)
        for policy in (max_min_fairness, blind(max_min_fairness))
    ]

    assert runs[1].mean_seconds > 1.1 * runs[0].mean_seconds


def test_runs_repeat_and_gangs_finish():
    kinds = (*KINDS[:2], replace(KINDS[2], workers=8))
    workload = poisson_workload(thesis_types(), 12, 12.0, seed=1, gangs=True)
    run = simulate_fleet(workload, kinds, finish_time_fairness, round_seconds=7200)

    assert run == simulate_fleet(workload, kinds, finish_time_fairness, round_seconds=7200)
    assert {job.job.workers for job in run.jobs} == {1, 2, 4, 8}


def test_deadlines_are_kept_where_money_allows():
    """A job that is cheapest on the slow kind, with a deadline that only the fast one meets."""
    kinds = (Kind("fast", 4, 3.0), Kind("slow", 4, 0.5))
    workload = [
        Arrival(0.0, Job(f"job {m}", 7200, deadline_seconds=9000 if m else 40_000), (1.0, 0.25)) for m in range(2)
    ]
    cheap = simulate_fleet(workload, kinds, min_cost, ideal=True)
    kept = simulate_fleet(workload, kinds, min_cost_near_deadlines, ideal=True)
    # In rounds a job is late by what its last ones miss, unless the policy is asked again meanwhile.
    options = {"restart_seconds": 0, "round_seconds": 120, "reset_rounds": 1}
    rounds = simulate_fleet(workload, kinds, min_cost_near_deadlines, **options)

    assert (cheap.late, kept.late) == (1, 0)
    assert cheap.cost == pytest.approx(2 * 8 * 0.5)
    # 9000 s on both kinds: 11/15 of it on the fast one.
    assert kept.cost == pytest.approx(8 * 0.5 + 2.5 * (11 * 3.0 + 4 * 0.5) / 15)
    assert max(job.seconds for job in rounds.jobs if job.job.name == "job 1") <= 9000 + 120


@pytest.mark.parametrize("ideal", [True, False])
def test_a_budget_lasts_to_the_end(ideal):
    """Half an hour on the fast kind and one on the slow one. In rounds the last ones may cost a little more."""
    kinds = (Kind("fast", 1, 4.0), Kind("slow", 1, 1.0))
    workload = [Arrival(0.0, Job("a", 7200), (2.0, 1.0))]
    options = {"ideal": ideal, "round_seconds": 60, "restart_seconds": 0, "reset_rounds": 1}
    run = simulate_fleet(workload, kinds, min_makespan_within_budget, budget=3, **options)

    assert run.makespan == pytest.approx(5400, rel=1e-4 if ideal else 0.03)
    assert run.cost == pytest.approx(3, rel=1e-4 if ideal else 0.03)
    with pytest.raises(PlanError, match="budget: expected at least 2, what the jobs cost"):
        simulate_fleet(workload, kinds, min_makespan_within_budget, budget=1.9, ideal=ideal)


def test_a_deadline_that_a_later_job_makes_impossible_ends_no_run():
    workload = [Arrival(at, Job(name, 100, deadline_seconds=120), (1.0,)) for at, name in ((0.0, "a"), (50.0, "b"))]
    run = simulate_fleet(workload, (Kind("GPU", 1, 1.0),), min_cost_with_deadlines, ideal=True)

    assert len(run.jobs) == 2 and run.late >= 1


def test_jobs_that_end_together_end_at_once():
    """What the tolerance of a linear program leaves of some is no job."""
    kinds = [Kind(name, 4) for name in THESIS_KINDS]
    workload = static_workload(thesis_types(), 100, seed=0)
    rows = tuple(arrival.throughputs for arrival in workload)
    static = min_makespan(Problem(tuple(arrival.job for arrival in workload), tuple(kinds), rows))
    run = simulate_fleet(workload, kinds, min_makespan, ideal=True)

    # One job ends before the 99 others.
    assert run.allocations == 2 and len(run.jobs) == 100
    assert run.makespan == pytest.approx(static.seconds_left().max(), rel=1e-6)


def test_prices_change_where_jobs_run(tmp_path):
    """The slow kind becomes cheaper per step after an hour, and the job moves."""
    path = tmp_path / "prices.csv"
    path.write_text("seconds,kind,price\n0,slow,3\n3600,slow,0.1\n")
    prices = PriceHistory.load(path)
    kinds = (Kind("fast", 1, 2.0), Kind("slow", 1, 1.0))
    run = simulate_fleet([Arrival(0.0, Job("a", 7200), (1.0, 0.5))], kinds, min_cost, prices=prices, restart_seconds=0)

    assert run.jobs[0].finished == 3 * 3600
    assert run.cost == pytest.approx(2.0 + 2 * 0.1)
    assert (prices.at("slow", 3599), prices.at("slow", 3600), prices.at("fast", 0)) == (3.0, 0.1, None)
    path.write_text("0,slow\n")
    with pytest.raises(PlanError, match="line 1: expected seconds,kind,price"):
        PriceHistory.load(path)
    with pytest.raises(PlanError, match="expected prices of fast, slow, found some of Slow"):
        mistaken = PriceHistory({"Slow": ((0.0, 1.0),)})
        simulate_fleet([Arrival(0.0, Job("a", 7200), (1.0, 0.5))], kinds, min_cost, prices=mistaken)
    with pytest.raises(PlanError, match="from second 0 on, ascending"):
        PriceHistory({"slow": ((5.0, 1.0),)})


def test_two_jobs_share_a_device():
    """Alone 1 step a second, together 0.8: `a` ends after 125 s, and `b` has the device for itself."""
    pairs = {("b", "a"): ((0.8,), (0.8,))}
    workload = [Arrival(0.0, Job("a", 100), (1.0,)), Arrival(0.0, Job("b", 150), (1.0,))]
    options = {"pairs": pairs, "restart_seconds": 0}
    rounds = simulate_fleet(workload, GPU, max_min_fairness, round_seconds=1000, record=True, **options)
    ideal = simulate_fleet(workload, GPU, max_min_fairness, ideal=True, **options)

    for run in (rounds, ideal):
        assert {job.job.name: job.finished for job in run.jobs} == pytest.approx({"a": 125, "b": 175})
        # The device costs 3.6 an hour; while both have it, each pays a half.
        assert [job.cost for job in run.jobs] == pytest.approx([0.0625, 0.0625 + 0.05])
    assert [held.job for held in rounds.held] == ["a + b"]
    assert simulate_fleet(workload, GPU, max_min_fairness, round_seconds=10, restart_seconds=0).makespan == 250
    with pytest.raises(PlanError, match="expected the names of two jobs of the workload"):
        simulate_fleet(workload, GPU, max_min_fairness, pairs={("a", "c"): ((1.0,), (1.0,))})
    with pytest.raises(PlanError, match="expected two rows of 1 numbers"):
        simulate_fleet(workload, GPU, max_min_fairness, pairs={("a", "b"): ((1.0, 2.0), (1.0,))})


def test_a_job_moves_when_its_remaining_steps_pay_for_it():
    """Steps cost half as much on `far`. A move costs 5, and saves 10 of the long job, and 2 of the short one."""
    kinds = (Kind("near", 2, 2.0, region="here", egress_per_gigabyte=0.05), Kind("far", 2, 1.0, region="there"))
    workload = [
        Arrival(0.0, Job(f"{hours} hours", hours * 3600, gigabytes=100, region="here"), (1.0, 1.0)) for hours in (10, 2)
    ]
    for policy in (min_cost, min_cost_near_deadlines):
        run = simulate_fleet(workload, kinds, policy, round_seconds=3600, restart_seconds=0)

        assert {job.job.name: job.cost for job in run.jobs} == {
            "2 hours": pytest.approx(4),
            "10 hours": pytest.approx(15),
        }


def test_spot_devices_are_taken_away():
    """Each time a job loses the rest of its round and a restart. The cost policies know what that costs on average: a
    cheap device that is lost every ten minutes is dearer than one that stays.
    """
    spot = (Kind("spot", 1, 1.0, preempted_every_seconds=3600),)
    workload = [Arrival(0.0, Job("a", 36_000), (1.0,))]
    options = {"round_seconds": 600, "restart_seconds": 60}
    runs = [simulate_fleet(workload, spot, max_min_fairness, seed=seed, **options) for seed in range(8)]
    kinds = (replace(spot[0], preempted_every_seconds=600), Kind("stays", 1, 1.4))
    chosen = simulate_fleet([Arrival(0.0, Job("a", 36_000), (1.0, 1.0))], kinds, min_cost, record=True, **options)

    assert runs[0] == simulate_fleet(workload, spot, max_min_fairness, seed=0, **options) != runs[1]
    assert all(run.jobs[0].restarts > 0 for run in runs)
    # Ten hours and about ten losses of half a round and a restart.
    assert sum(run.makespan for run in runs) / 8 == pytest.approx(36_000 + 10 * 360, rel=0.05)
    assert all(run.jobs[0].busy_seconds < run.makespan for run in runs), "what is taken away costs nothing"
    assert {held.devices for held in chosen.held} == {"stays"}


def test_pictures_show_every_job_and_escape_its_name():
    named = [Arrival(0.0, Job(name, 100), (1.0,)) for name in ("a", "<b>\x1b")]
    run = simulate_fleet(named, GPU, max_min_fairness, round_seconds=50, record=True)
    devices = ElementTree.fromstring(devices_svg(run))
    titles = ["".join(title.itertext()) for title in devices.iter("{http://www.w3.org/2000/svg}title")]

    assert any(title.startswith("<b>\\x1b: ") for title in titles)
    assert sum(":" in title for title in titles) == len(run.held)
    assert len(list(ElementTree.fromstring(completion_svg({"x": run, "y": run})).iter())) > 20
    assert "restarts from a checkpoint" in run_page("a run", run)
    with pytest.raises(PlanError, match="record=True"):
        devices_svg(replace(run, held=()))


def test_workloads_are_those_of_the_thesis():
    types = thesis_types()
    work = poisson_workload(types, 4000, 5.6, gangs=True)
    hours = [arrival.job.steps / arrival.throughputs[0] / 3600 for arrival in work]
    sizes = [arrival.job.workers for arrival in work]

    assert len(types) == 26
    assert work[-1].seconds / 3600 == pytest.approx(4000 / 5.6, rel=0.05)
    # Four fifths of 10^U[1.5, 3] minutes and a fifth of 10^U[3, 4]: 16.8 hours on average.
    assert sum(hours) / len(hours) == pytest.approx(16.8, rel=0.1)
    assert [sizes.count(workers) / 4000 for workers in (1, 2, 4, 8)] == pytest.approx([0.7, 0.1, 0.15, 0.05], abs=0.02)
    assert {arrival.seconds for arrival in static_workload(types, 5)} == {0.0}
    assert poisson_workload(types, 9, 1.0, seed=3) == poisson_workload(types, 9, 1.0, seed=3)


def test_gangs_have_their_own_throughputs():
    """The published throughputs of gangs; models that train on one worker form none."""
    types = {each.name: each for each in thesis_types()}
    alone = {name for name, each in types.items() if not each.gangs}
    work = poisson_workload(thesis_types(), 1000, 5.6, gangs=True)

    assert alone == {"A3C/4", "CycleGAN/1", *(f"Recoder/{size}" for size in (512, 1024, 2048, 4096, 8192))}
    assert types["ResNet-50/64"].gangs == {2: (7.922, 5.516, 1.264), 4: (9.452, 10.36, 2.412), 8: (17.3, 18.22, 4.569)}
    for arrival in work:
        kind = types[arrival.job.name.split()[1]]
        workers = arrival.job.workers
        assert arrival.throughputs == (kind.throughputs if workers == 1 else kind.gangs[workers])
    assert {arrival.job.workers for arrival in static_workload([types["A3C/4"]], 50)} == {1}
    with pytest.raises(PlanError, match=r"gangs: expected a type of jobs with throughputs of . workers, found none"):
        static_workload([types["A3C/4"]], 50, gangs=True)


def test_a_policy_that_serves_no_job_is_refused():
    def nothing(problem):
        return Allocation(problem, tuple((0.0,) for _ in problem.jobs))

    for ideal in (False, True):
        with pytest.raises(PlanError, match="expected a share for some job, found none"):
            simulate_fleet(arrivals(1), GPU, nothing, ideal=ideal)
    with pytest.raises(PlanError, match="expected one arrival or more"):
        simulate_fleet([], GPU, max_min_fairness)


def test_the_fleet_of_the_thesis_does_its_load():
    """5.6 jobs an hour are less than 36 devices of each kind can do, and more than they can do if kinds look alike. The
    numbers are those of an independent program.
    """
    kinds = tuple(Kind(name, 36) for name in THESIS_KINDS)
    minutes = 0.8 * (1e3 - 10**1.5) / math.log(10**1.5) + 0.2 * (1e4 - 1e3) / math.log(10)
    types = [each for each in thesis_types() for _ in range(60)]
    jobs = tuple(Job(f"job {m}", each.throughputs[0] * minutes * 60) for m, each in enumerate(types))
    problem = Problem(jobs, kinds, tuple(each.throughputs for each in types))
    hourly = [len(jobs) * 3600 / policy(problem).seconds_left().max() for policy in (min_makespan, blind(min_makespan))]

    assert hourly == pytest.approx([5.84, 4.80], abs=0.01)
