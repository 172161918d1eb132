"""Each policy equals the thesis's example, and a second formulation on random problems."""

from dataclasses import replace

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleets.baselines import blind, isolated_shares
from penstock import PlanError
from penstock.fleet import (
    POLICIES,
    Allocation,
    Entity,
    Job,
    Kind,
    Pair,
    Problem,
    fifo,
    finish_time_fairness,
    hierarchical,
    max_min_fairness,
    max_throughput,
    min_cost,
    min_cost_with_deadlines,
    min_makespan,
    min_makespan_within_budget,
    shortest_job_first,
    strict_fifo,
    water_filling,
)
from support.fleet_problems import THESIS, Reference, fleet_problems, is_greatest

# The solver meets its constraints up to 1e-9 of the largest number. A small share is less exact than a large one.
NEAR = 2e-6
few = settings(derandomize=True, max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_worked_example_of_the_thesis():
    found = max_min_fairness(THESIS)

    assert numpy.round(found.array(), 2).tolist() == [[0.45, 0.0], [0.45, 0.09], [0.09, 0.91]]
    assert found.throughputs() == pytest.approx([200 / 11, 64 / 11, 600 / 11], abs=NEAR)
    assert found.normalized() == pytest.approx([8 / 11] * 3, abs=NEAR)
    assert found.throughputs() / isolated_shares(THESIS).throughputs() == pytest.approx([12 / 11] * 3, abs=NEAR)
    assert THESIS.equal_shares().tolist() == [0.5, 0.5]


def test_water_filling_example_of_the_thesis():
    """Weights 3, 1, 1, 1 and four equal devices: job 1 is limited at 1, then the others rise from a third to 1."""
    jobs = (Job("1", 1, weight=3.0), *(Job(name, 1) for name in "234"))
    found = water_filling(Problem(jobs, (Kind("GPU", 4),), ((1.0,),) * 4))
    half = water_filling(Problem(jobs, (Kind("GPU", 2),), ((1.0,),) * 4))

    assert found.array().ravel() == pytest.approx([1, 1, 1, 1], abs=NEAR)
    assert half.array().ravel() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3], abs=NEAR)


def test_figure_of_the_hierarchical_policy():
    """A product team of three jobs that share, and a research team whose jobs take turns."""
    jobs = (*(Job(name, 1, entity="product") for name in "123"), *(Job(name, 1, entity="research") for name in "45"))
    entities = (Entity("product", 1.0), Entity("research", 2.0, first_come=True))

    def shares(workers: int) -> list[float]:
        problem = Problem(jobs, (Kind("GPU", workers),), ((1.0,),) * 5, entities=entities)
        return hierarchical(problem).array().ravel().tolist()

    # Research is owed 2/3 of one device, which its first job takes. Of two, job 4 has one when the product team has
    # half a device. The other half goes to job 5 and the product team, 2 to 1.
    assert shares(1) == pytest.approx([1 / 9, 1 / 9, 1 / 9, 2 / 3, 0], abs=NEAR)
    assert shares(2) == pytest.approx([2 / 9, 2 / 9, 2 / 9, 1, 1 / 3], abs=NEAR)
    assert shares(5) == pytest.approx([1, 1, 1, 1, 1], abs=NEAR)


@few
@given(fleet_problems())
def test_the_least_level_and_the_makespan_are_the_best_of_all(problem):
    reference = Reference(problem)
    owed = reference.fair_units() * [job.weight for job in problem.jobs]
    steps = numpy.array([job.steps for job in problem.jobs])

    assert is_greatest((max_min_fairness(problem).throughputs() / owed).min(), lambda x: reference.reaches(x * owed))
    assert is_greatest(1 / min_makespan(problem).seconds_left().max(), lambda rate: reference.reaches(steps * rate))


@few
@given(fleet_problems())
def test_finish_time_fairness_is_the_least_ratio(problem):
    reference = Reference(problem)
    steps = numpy.array([job.steps for job in problem.jobs])
    age = numpy.array([job.elapsed_seconds for job in problem.jobs])
    alone = age + steps / isolated_shares(problem).throughputs()

    def holds(speedup: float) -> bool:
        return bool((alone / speedup > age).all()) and reference.reaches(steps / (alone / speedup - age))

    rho = ((age + finish_time_fairness(problem).seconds_left()) / alone).max()

    assert is_greatest(1 / rho, holds)


@few
@given(fleet_problems())
def test_fifo_is_the_printed_sum(problem):
    reference = Reference(problem)
    fastest = reference.speeds.max(axis=1)
    weights = (len(problem.jobs) - numpy.arange(len(problem.jobs))) / fastest
    found = fifo(problem).throughputs() @ weights

    assert found == pytest.approx(reference.best(weights @ reference.effective()), rel=NEAR)


@few
@given(fleet_problems(most_jobs=4))
def test_strict_orders_are_lexicographic(problem):
    reference = Reference(problem)
    fastest = reference.speeds.max(axis=1)
    seconds = [job.steps / max(row) for job, row in zip(problem.jobs, problem.throughputs, strict=True)]
    for policy, order in (
        (strict_fifo, list(range(len(problem.jobs)))),
        (shortest_job_first, sorted(range(len(problem.jobs)), key=seconds.__getitem__)),
    ):
        levels = numpy.zeros(len(problem.jobs))
        for m in order:
            levels[m] = reference.best(reference.effective()[m], levels - 1e-7 * fastest)

        # A job that has a little less than its level, within the tolerance, may leave a little more for the next one.
        assert policy(problem).throughputs() / fastest == pytest.approx(levels / fastest, abs=1e-3)


def test_a_job_that_waits_takes_nothing_from_those_behind():
    """The second job has to wait for the first one, and the third one has a kind for itself."""
    jobs = tuple(Job(f"job {m}", 100, workers=2 if m == 2 else 1) for m in range(4))
    problem = Problem(jobs, (Kind("A", 1), Kind("B", 3)), ((1, 0), (1, 0), (0, 1), (1, 0)))

    for policy in (strict_fifo, shortest_job_first):
        assert policy(problem).array() == pytest.approx(numpy.array([[1, 0], [0, 0], [0, 1], [0, 0]]), abs=1e-5)


@few
@given(fleet_problems())
def test_throughput_and_cost_are_the_greatest_sums(problem):
    reference = Reference(problem)
    relative = reference.speeds / reference.speeds.max(axis=1, keepdims=True)
    prices = numpy.array([kind.price_per_hour for kind in problem.kinds])
    sizes = numpy.array([job.workers for job in problem.jobs])
    for policy, gains in (
        (max_throughput, relative * sizes[:, None]),
        (min_cost, relative / prices),
        (min_cost_with_deadlines, relative / prices),
    ):
        assert (policy(problem).array() * gains).sum() == pytest.approx(reference.best(gains.ravel()), rel=NEAR)


@few
@given(fleet_problems(most_jobs=4), st.floats(1.2, 4.0))
def test_deadlines_are_met_at_the_least_cost_or_named(problem, patience):
    jobs = tuple(
        replace(job, deadline_seconds=patience * job.steps / max(row))
        for job, row in zip(problem.jobs, problem.throughputs, strict=True)
    )
    problem = replace(problem, jobs=jobs)
    reference = Reference(problem)
    required = numpy.array([job.steps / job.deadline_seconds for job in jobs])
    if reference.reaches(required * (1 + 1e-6)):
        found = min_cost_with_deadlines(problem)
        assert (found.throughputs() >= required * (1 - NEAR)).all()
    elif not reference.reaches(required * (1 - 1e-6)):
        with pytest.raises(PlanError, match=r"finishes job 'job \d' in .* s, where its deadline is in"):
            min_cost_with_deadlines(problem)


@few
@given(fleet_problems(most_jobs=4), st.floats(1.01, 3.0))
def test_no_shorter_makespan_is_within_the_budget(problem, generosity):
    """The thesis asks for each makespan whether some shares meet it; we solve for durations."""
    prices = numpy.array([kind.price_per_hour for kind in problem.kinds]) / 3600
    sizes = numpy.array([job.workers for job in problem.jobs])
    steps = numpy.array([job.steps for job in problem.jobs])
    reference = Reference(problem)
    with numpy.errstate(divide="ignore"):
        least = ((prices / reference.speeds).min(axis=1) * sizes * steps).sum()
    rich, poor = replace(problem, budget=least * generosity), replace(problem, budget=least * 0.99)
    # Hourly prices, since the reference's tolerance is absolute.
    cost, hourly = numpy.outer(sizes, prices * 3600).ravel(), least * generosity * 3600
    found = 1 / min_makespan_within_budget(rich).seconds_left().max()

    assert is_greatest(found, lambda rate: reference.reaches(steps * rate, [(cost, hourly * rate)]))
    with pytest.raises(PlanError, match="budget: expected at least"):
        min_makespan_within_budget(poor)


def level_by_level(problem, weights_of):
    """Water filling as the thesis has it, with a program for each job that asks whether it could have more.

    `weights_of`: the weights of all jobs, for the set of those that are not limited yet.
    """
    reference = Reference(problem)
    units, jobs = reference.fair_units(), len(problem.jobs)
    levels, running = numpy.zeros(jobs), set(range(jobs))
    while running:
        weights = numpy.array(weights_of(running))
        start = levels.copy()
        levels = start + reference.rise(start * units, weights * units) * weights
        kept = levels * units - 1e-7 * reference.speeds.max(axis=1)
        room = {
            m: reference.best(reference.effective()[m], kept) / max(levels[m] * units[m], 1e-300)
            for m in numpy.flatnonzero(weights)
        }
        # In exact arithmetic at least one job has no room: the bisection is too coarse to tell where none is below.
        bound = max(1 + 1e-4, min(room.values()))
        running -= {m for m, ratio in room.items() if ratio <= bound}
    return levels * units


@settings(few, max_examples=6)
@given(fleet_problems(most_jobs=4))
def test_water_filling_equals_one_program_per_job(problem):
    def weights(running):
        return [job.weight * (m in running) for m, job in enumerate(problem.jobs)]

    assert water_filling(problem).throughputs() == pytest.approx(level_by_level(problem, weights), rel=1e-3, abs=1e-6)


@settings(few, max_examples=12)
@given(fleet_problems(most_jobs=5, most_kinds=2), st.data())
def test_hierarchical_equals_one_program_per_job(problem, data):
    """Two entities of any weights, fair or in order; the jobs of one may come between those of the other."""
    orders, owners = (
        data.draw(st.tuples(st.booleans(), st.booleans())),
        data.draw(st.lists(st.sampled_from("ab"), min_size=len(problem.jobs), max_size=len(problem.jobs))),
    )
    entities = tuple(
        Entity(name, data.draw(st.sampled_from([1.0, 2.0, 3.0])), first_come=order)
        for name, order in zip("ab", orders, strict=True)
    )
    jobs = tuple(replace(job, entity=owner) for job, owner in zip(problem.jobs, owners, strict=True))
    problem = replace(problem, jobs=jobs, entities=entities)

    def weights(running):
        """An entity's weight belongs to its first job that is left, or to all of them by their weights."""
        found = numpy.zeros(len(jobs))
        for entity in entities:
            left = [m for m in sorted(running) if jobs[m].entity == entity.name]
            left = left[:1] if entity.first_come else left
            for m in left:
                found[m] = entity.weight * jobs[m].weight / sum(jobs[each].weight for each in left)
        return found

    expected = level_by_level(problem, weights)
    assert hierarchical(problem).throughputs() == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_a_blind_policy_fills_all_kinds_where_a_job_cannot_run_everywhere():
    """One job runs on A only, and has it; the three others share what is left of A, and all of B."""
    jobs = tuple(Job(f"job {m}", steps=1e3) for m in range(4))
    problem = Problem(jobs, (Kind("A", workers=2), Kind("B", workers=2)), ((3, 0), (5, 1), (2, 1), (1, 1)))
    expected = [[1, 0]] + [[1 / 3, 2 / 3]] * 3
    twice = Problem(
        (*jobs, *(replace(job, name=f"later {job.name}") for job in jobs)), problem.kinds, problem.throughputs * 2
    )

    assert blind(max_min_fairness)(problem).array() == pytest.approx(numpy.array(expected), abs=1e-5)
    # The later jobs have no time.
    assert blind(strict_fifo)(twice).array()[4:] == pytest.approx(0.0, abs=1e-5)


@few
@given(fleet_problems(most_kinds=1))
def test_policies_on_one_kind_are_the_blind_ones(problem):
    for policy in (max_min_fairness, water_filling, min_makespan, finish_time_fairness, strict_fifo):
        assert policy(problem).array() == pytest.approx(blind(policy)(problem).array(), abs=1e-4)


@few
@given(fleet_problems(most_jobs=4, pairs=True))
def test_pairs_never_make_it_worse(problem):
    alone = replace(problem, pairs=())
    units = Reference(alone).fair_units() * [job.weight for job in problem.jobs]
    levels = [(max_min_fairness(each).throughputs() / units).min() for each in (alone, problem)]

    assert levels[1] >= levels[0] * (1 - NEAR)
    assert min_makespan(problem).seconds_left().max() <= min_makespan(alone).seconds_left().max() * (1 + NEAR)


def test_space_sharing_example():
    """Two jobs that run at 80 % beside each other: sharing one device gives each 0.8 in place of a half."""
    jobs = (Job("a", 100), Job("b", 100))
    pair = Pair((0, 1), ((8.0,), (4.0,)))
    found = max_min_fairness(Problem(jobs, (Kind("GPU", 1),), ((10,), (5,)), (pair,)))

    assert found.array().ravel() == pytest.approx([0, 0, 1], abs=NEAR)
    assert found.throughputs() == pytest.approx([8, 4], abs=1e-5)
    assert "a + b" in found.explain()


def test_placements_share_their_devices():
    """A gang that is faster on one server: both ways to run it take the same four devices."""
    kinds = (
        Kind("V100 on a server", 4, workers_per_server=4, pool="V100", consolidated=True),
        Kind("V100 anywhere", 4, workers_per_server=4, pool="V100"),
    )
    problem = Problem((Job("gang", 10, workers=4), Job("one", 10)), kinds, ((4.0, 2.0), (1.0, 1.0)))
    found = strict_fifo(problem)

    assert found.array() == pytest.approx(numpy.array([[1, 0], [0, 0]]), abs=NEAR)
    assert found.used() == {"V100": pytest.approx(4)}
    assert problem.equal_shares().tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("problem", [None, {}, Problem])
def test_every_policy_refuses_what_is_no_problem(name, problem):
    with pytest.raises(PlanError, match=r"policy\(problem=\): expected a Problem, found .*: build one"):
        POLICIES[name](problem)


@pytest.mark.parametrize("name", [name for name in POLICIES if "budget" not in name and name != "allox"])
def test_every_policy_gives_a_valid_allocation(name):
    jobs = tuple(Job(f"job {m}", 50.0 * (m + 1), workers=1 + m % 3, entity="ab"[m % 2]) for m in range(9))
    kinds = (Kind("V100", 4, 2.48), Kind("P100", 3, 1.46), Kind("K80", 5, 0.45))
    rows = tuple((10.0 + m, 5.0, 1.0 + m / 9) for m in range(9))
    entities = (Entity("a", 2.0), Entity("b", first_come=True))
    found = POLICIES[name](Problem(jobs, kinds, rows, entities=entities))

    assert found.policy == name
    assert len(found.limits()) == 9
    assert found.explain().count("\n") == 10
    assert [row["job"] for row in found.as_document()["jobs"]] == [job.name for job in jobs]


def test_equal_jobs_get_equal_shares_and_cost_nothing():
    """Five hundred jobs of two types over three kinds are a program of two."""
    jobs = tuple(Job(f"job {m}", 100) for m in range(500))
    rows = tuple(((40.0, 10.0), (12.0, 4.0))[m % 2] for m in range(500))
    found = max_min_fairness(Problem(jobs, (Kind("V100", 36), Kind("K80", 36)), rows)).array()

    assert numpy.ptp(found[::2], axis=0).max() == 0 and numpy.ptp(found[1::2], axis=0).max() == 0


def test_reasons_say_what_limits_a_job():
    problem = Problem(
        (Job("a", 10), Job("b", 10), Job("c", 10)), (Kind("V100", 1), Kind("K80", 2)), ((10, 1), (10, 1), (0, 1))
    )
    first = strict_fifo(problem)
    rows = ((0.5, 0.0), (0.0, 0.5), (0.0, 1.0))

    assert first.limits() == (
        "nothing: it has its fastest kind all of the time",
        "V100: no worker is free; it runs all of the time",
        "nothing: it has its fastest kind all of the time",
    )
    assert Allocation(problem, rows).limits()[:2] == (
        "the policy: V100, K80 has free time",
        "the policy: V100, K80 has free time",
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Job("a", 0), "steps: expected a finite number of steps above 0, found 0 in job 'a'"),
        (lambda: Kind("a", 0), "workers: expected a whole number of workers, 1 or more, found 0 in kind 'a'"),
        (lambda: Problem((), (), ()), "expected one job and one kind or more"),
        (lambda: replace(THESIS, throughputs=((1, 2),)), r"expected 3 rows \(one per job\), found 1"),
        (lambda: replace(THESIS, throughputs=((1,), (1,), (1,))), r"expected 2 numbers \(one per kind\), found 1"),
        (lambda: replace(THESIS, throughputs=((0, None), (1, 1), (1, 1))), "job 'job 0': expected a kind that it runs"),
        (lambda: replace(THESIS, jobs=(Job("x", 1),) * 3), "'x': expected names that differ"),
        (lambda: replace(THESIS, entities=(Entity("a"),)), "job 'job 0': entity: expected one of a, found ''"),
        (lambda: replace(THESIS, pairs=(Pair((1, 0), ((1, 1), (1, 1))),)), "pair: expected the numbers of two jobs"),
        (lambda: replace(THESIS, kinds=(Kind("a", 1, pool="p"), Kind("b", 2, pool="p"))), "they are the same devices"),
        (lambda: Allocation(THESIS, ((1, 0), (0, 1))), "expected 3 rows of 2 numbers"),
        (lambda: Allocation(THESIS, ((1, 0.1), (0, 0), (0, 0))), "job 'job 0': expected at most all of the time"),
        (lambda: Allocation(THESIS, ((1, 0), (0.1, 0), (0, 0))), "'V100': expected at most 1 worker, found 1.1"),
        (lambda: Allocation(THESIS, ((-1, 0), (0.1, 0), (0, 0))), "expected numbers of 0 or more"),
        (lambda: hierarchical(THESIS), "entities: expected one or more"),
        (lambda: min_makespan_within_budget(THESIS), "budget: expected the most that the jobs may cost"),
        (lambda: min_cost(replace(THESIS, kinds=(Kind("a", 1, 1.0), Kind("b", 1)))), "kind 'b': price_per_hour"),
    ],
)
def test_wrong_problems_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()
