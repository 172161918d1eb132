"""Rounds come close to the shares, and never give a job or a worker twice."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleets.baselines import isolated_shares
from penstock import PlanError
from penstock.fleet import Allocation, Job, Kind, Lease, Pair, Problem, RoundScheduler, max_min_fairness, min_makespan
from support.fleet_problems import THESIS, fleet_problems


def run(allocation: Allocation, rounds: int) -> tuple[RoundScheduler, list[tuple[Lease, ...]]]:
    """`rounds` rounds of one second."""
    scheduler, history = RoundScheduler(allocation.problem.kinds), []
    scheduler.begin(allocation)
    for _ in range(rounds):
        history.append(scheduler.next_round())
        scheduler.end_round({lease.jobs: 1.0 for lease in history[-1]})
    return scheduler, history


def drift(allocation: Allocation, rounds: int) -> float:
    """The greatest difference between a share of time received and its target."""
    scheduler, _ = run(allocation, rounds)
    return float(numpy.abs(scheduler.received() / rounds - allocation.array()).max())


def test_received_time_approaches_the_shares_of_the_worked_example():
    found = max_min_fairness(THESIS)

    assert drift(found, 10) <= 0.1
    assert drift(found, 50) < 0.03
    assert drift(found, 1000) <= 0.002


def test_received_time_approaches_the_figure_of_the_thesis():
    """The allocation of figure 5.3: three jobs on a device of each of three kinds."""
    jobs, kinds = tuple(Job(f"job {m}", 1) for m in range(3)), tuple(Kind(name, 1) for name in ("V100", "P100", "K80"))
    problem = Problem(jobs, kinds, ((1.0,) * 3,) * 3)

    assert drift(Allocation(problem, ((0.6, 0.4, 0.0), (0.2, 0.6, 0.2), (0.2, 0.0, 0.8))), 50) < 0.03


@settings(max_examples=15)
@given(fleet_problems(most_jobs=6, most_workers=3, pairs=True), st.sampled_from([max_min_fairness, min_makespan]))
def test_no_job_and_no_worker_is_given_twice(problem, policy):
    allocation = policy(problem)
    _, history = run(allocation, 12)
    rows = {
        tuple(problem.jobs[m].name for m in members): row
        for members, row in zip(problem.combinations, allocation.shares, strict=True)
    }
    sizes = {job.name: job.workers for job in problem.jobs}
    names = [kind.name for kind in problem.kinds]
    for leases in history:
        jobs = [name for lease in leases for name in lease.jobs]
        workers = [(lease.devices, worker) for lease in leases for worker in lease.workers]

        assert len(set(jobs)) == len(jobs) and len(set(workers)) == len(workers)
        for lease in leases:
            assert len(lease.workers) == sizes[lease.jobs[0]]
            assert max(lease.workers) < problem.pools[lease.devices]
            assert rows[lease.jobs][names.index(lease.kind)] > 0
    assert history == run(allocation, 12)[1], "the same events lead to the same leases"


@settings(max_examples=10)
@given(fleet_problems(most_jobs=4, most_workers=3))
def test_each_job_with_a_share_is_served_in_the_end(problem):
    """The rounds free whole gangs, so that none starves beside small jobs."""
    allocation = isolated_shares(problem)
    scheduler, _ = run(allocation, 60)

    assert (scheduler.received()[allocation.array() > 0.05] > 0).all()


def test_a_large_job_is_not_starved_by_small_ones():
    jobs = (*(Job(f"small {m}", 1) for m in range(6)), Job("large", 1, workers=4))
    problem = Problem(jobs, (Kind("GPU", 4),), ((1.0,),) * 7)
    found = max_min_fairness(problem)
    scheduler, _ = run(found, 100)

    assert scheduler.received()[-1, 0] / 100 == pytest.approx(found.shares[-1][0], abs=0.02)


def test_no_job_starves_where_allocations_follow_each_other_fast():
    """A new allocation after every round: what the last one owed decides."""
    problem = Problem((Job("a", 1), Job("b", 1), Job("c", 1)), (Kind("GPU", 1),), ((1.0,),) * 3)
    allocation, served = Allocation(problem, ((0.5,), (0.3,), (0.2,))), []
    scheduler = RoundScheduler(problem.kinds)
    for _ in range(100):
        scheduler.begin(allocation)
        served += scheduler.next_round()
        scheduler.end_round({lease.jobs: 1.0 for lease in served[-1:]})

    assert [sum(lease.jobs == (name,) for lease in served) for name in "abc"] == [50, 30, 20]


def test_leases_are_renewed_where_a_job_stays():
    problem = Problem((Job("a", 1), Job("b", 1), Job("c", 1)), (Kind("GPU", 2),), ((1.0,),) * 3)
    _, history = run(Allocation(problem, ((1.0,), (0.5,), (0.5,))), 4)
    of_a = [lease for leases in history for lease in leases if lease.jobs == ("a",)]

    assert [lease.renewed for lease in of_a] == [False, True, True, True]
    assert len({lease.workers for lease in of_a}) == 1
    assert [lease.jobs[0] for leases in history for lease in leases if lease.jobs != ("a",)] == ["b", "c", "b", "c"]


def test_leases_that_are_kept_come_first():
    """The lease of `a` goes on against its priority, and even if a new allocation has no share for it."""
    problem = Problem((Job("a", 1), Job("b", 1)), (Kind("GPU", 1),), ((1.0,),) * 2)
    scheduler, history = run(Allocation(problem, ((0.5,), (0.5,))), 1)
    kept = scheduler.next_round(kept=["a"])
    scheduler.begin(Allocation(problem, ((0.0,), (1.0,))))

    assert [lease.jobs for lease in history[0]] == [("a",)]
    assert kept == scheduler.next_round(kept=["a"]) and kept[0].jobs == ("a",) and kept[0].renewed
    assert [lease.jobs for lease in scheduler.next_round(["b"], kept=["a"])] == [("b",)]


def test_gangs_are_on_few_servers():
    """Eight devices on two servers: the gang of four has a server for itself, and the small jobs share the other."""
    jobs = (Job("one", 1), Job("two", 1, workers=2), Job("four", 1, workers=4), Job("last", 1))
    problem = Problem(jobs, (Kind("GPU", 8, workers_per_server=4),), ((1.0,),) * 4)
    _, history = run(Allocation(problem, ((1.0,),) * 4), 1)

    assert {lease.jobs[0]: lease.workers for lease in history[0]} == {
        "four": (0, 1, 2, 3),
        "two": (4, 5),
        "one": (6,),
        "last": (7,),
    }


def test_consolidated_jobs_move_others_away_or_wait():
    server = Kind("on a server", 4, workers_per_server=2, pool="GPU", consolidated=True)
    kinds = (server, Kind("anywhere", 4, workers_per_server=2, pool="GPU"))
    jobs = (Job("a", 1), Job("b", 1), Job("pair", 1, workers=2))
    problem = Problem(jobs, kinds, ((1.0, 1.0),) * 3)
    scheduler = RoundScheduler(kinds)
    scheduler.begin(Allocation(problem, ((0, 1.0), (0, 1.0), (0.5, 0))))
    # Both single jobs have run on different servers before, as if others had left.
    scheduler._leases = tuple(
        Lease((name,), "anywhere", "GPU", (worker,), renewed=False) for name, worker in (("a", 0), ("b", 2))
    )
    found = {lease.jobs[0]: lease for lease in scheduler.next_round()}

    assert found["pair"].workers == (0, 1) and {found["a"].workers, found["b"].workers} == {(2,), (3,)}
    assert not found["a"].renewed


def test_pairs_run_together():
    jobs = (Job("a", 1), Job("b", 1))
    problem = Problem(jobs, (Kind("GPU", 1),), ((1.0,), (1.0,)), (Pair((0, 1), ((0.8,), (0.8,))),))
    _, history = run(max_min_fairness(problem), 3)

    assert {lease.jobs for leases in history for lease in leases} == {("a", "b")}


def test_only_running_jobs_get_leases():
    scheduler = RoundScheduler(THESIS.kinds)
    assert scheduler.next_round() == ()
    scheduler.begin(max_min_fairness(THESIS))

    assert {lease.jobs for lease in scheduler.next_round(["job 1"])} == {("job 1",)}
    with pytest.raises(PlanError, match="expected the kinds of this scheduler"):
        RoundScheduler((Kind("other", 1),)).begin(max_min_fairness(THESIS))


def test_workers_that_are_gone_get_no_lease():
    """The lease of a gang ends with one of its workers; others stay where they are."""
    problem = Problem((Job("a", 1), Job("gang", 1, workers=2)), (Kind("GPU", 4),), ((1.0,),) * 2)
    scheduler, history = run(Allocation(problem, ((1.0,), (1.0,))), 1)
    less = scheduler.next_round(absent={"GPU": {0}})
    none = scheduler.next_round(absent={"GPU": {0, 1, 2}})

    def places(leases):
        return {(lease.jobs[0], lease.workers, lease.renewed) for lease in leases}

    assert places(history[0]) == {("gang", (0, 1), False), ("a", (2,), False)}
    assert places(less) == {("gang", (1, 3), False), ("a", (2,), True)}
    assert places(none) == {("a", (3,), False)}
