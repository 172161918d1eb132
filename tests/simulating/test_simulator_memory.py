"""The memory of a simulation: by hand, against the schedule's counts of what is in flight, and recounted slowly."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Forward, Recompute, WeightGradients
from penstock.scheduling.schedules import Schedule, inference
from penstock.simulating import evaluate, simulate
from penstock.timelines.memories import RankMemory
from penstock.timelines.timelines import Timeline
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage, schedule
from penstock.values.profiles import LayerProfile, Profile
from support.schedule_strategies import schedules
from support.simulation_problems import problems


def make_profile(stages: int, saved: float = 0.0, cut: float = 0.0, weights: float = 0.0) -> Profile:
    return Profile(tuple(LayerProfile("", 1.0, 2.0, cut, saved, weights) for _ in range(stages)), 1)


def instant(ranks: int) -> Cluster:
    return Cluster.uniform(ranks, float("inf"))


def most(course: tuple[tuple[float, float], ...]) -> float:
    return max((size for _, size in course), default=0.0)


@settings(max_examples=60, deadline=None)
@given(schedules(most_ranks=5, most_microbatches=12))
def test_most_activations_are_those_that_the_schedule_promises(schedule: Schedule) -> None:
    """Saved bytes of 1 for each stage: the peak of a rank is what its stages have in flight at once."""
    minibatches = 1 if schedule.flushes else 2 * schedule.ranks
    timeline = simulate(schedule, make_profile(schedule.stages, saved=1.0), instant(schedule.ranks), minibatches)

    for rank, memory in enumerate(timeline.memory):
        stages = schedule.stages_of(rank)
        if len(stages) == 1:
            assert most(memory.activations) == schedule.in_flight(stages[0])
        else:
            held = counted = 0
            for action in schedule.step(0)[rank]:
                held += isinstance(action, Forward) - isinstance(action, WeightGradients)
                counted = max(counted, held)
            assert most(memory.activations) == counted
        assert memory.activations[-1][1] == 0
        assert memory.buffers == ()


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (8, 3, 24), (2, 2, 4)])
def test_interleaving_keeps_what_megatron_keeps(p: int, v: int, m: int) -> None:
    """Rank 0 has up to 2(p-1) + (v-1)p + 1 of its stages' microbatches in flight."""
    timeline = simulate(Schedule("interleaved", p, m, v), make_profile(p * v, saved=1.0), instant(p))

    assert most(timeline.memory[0].activations) == 2 * (p - 1) + (v - 1) * p + 1


@pytest.mark.parametrize(
    ("method", "copies"),
    [("gpipe", [1, 1, 1]), ("pipedream", [3, 2, 1]), ("2bw", [2, 2, 2]), ("1f1b-flush", [1, 1, 1])],
)
def test_weights_gradients_and_optimizer(method: str, copies: list[int]) -> None:
    timeline = simulate(
        Schedule(method, 3, 3), make_profile(3, weights=10.0), instant(3), optimizer_copies=1.5, master_copies=2
    )
    found = [(m.weight_bytes, m.optimizer_bytes, m.master_bytes, most(m.buffers)) for m in timeline.memory]

    assert found == [(10 * count, 15, 20, 10) for count in copies]


def test_versions_of_low_precision_beside_their_masters() -> None:
    options = {"version_copies": 0.5, "master_copies": 1.0}
    timeline = simulate(Schedule("pipedream", 3, 3), make_profile(3, weights=10.0), instant(3), **options)

    assert [(m.weight_bytes, m.master_bytes, most(m.buffers)) for m in timeline.memory] == [
        (5 * count, 10, 10) for count in (3, 2, 1)
    ]


def test_libraries_keep_their_bytes_from_start_to_end(tmp_path: Path) -> None:
    plan, profile = Plan.uniform(2, 2, "gpipe", 2), make_profile(2, saved=3.0, weights=5.0)
    found, more = (simulate(plan, replace(profile, library_bytes=size), instant(2)) for size in (0.0, 7.0))

    assert [own.peak_bytes for own in more.memory] == [own.peak_bytes + 7 for own in found.memory]
    judged = evaluate(plan, replace(profile, library_bytes=7.0), instant(2))
    assert judged.peak_bytes == tuple(own.peak_bytes for own in more.memory)
    more.save_trace(tmp_path / "trace.json")
    assert Timeline.load_trace(tmp_path / "trace.json").memory == more.memory
    trace = json.loads((tmp_path / "trace.json").read_text())
    for event in trace["traceEvents"]:
        event.get("args", {}).pop("library", None)
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert Timeline.load_trace(tmp_path / "trace.json").memory == found.memory


def test_gradients_are_held_from_the_first_backward_to_the_update() -> None:
    """A single stage: forwards of 1 s, backwards of 2 s."""
    made = make_profile(1, weights=10.0)

    assert simulate(Schedule("gpipe", 1, 2), made, instant(1)).memory[0].buffers == ((4.0, 10.0), (6.0, 0.0))
    alone = simulate(Schedule("pipedream", 1, 2), made, instant(1), 1).memory[0]
    assert [(round(at, 9), held) for at, held in alone.buffers] == [(3.0, 10.0), (3.0, 0.0), (6.0, 10.0), (6.0, 0.0)]


def test_evaluation_keeps_no_activations_and_no_gradients() -> None:
    timeline = simulate(inference(2, 1, 3), make_profile(2, saved=5.0, weights=10.0), instant(2))

    assert [(m.activations, most(m.buffers)) for m in timeline.memory] == [((), 0), ((), 0)]


def test_messages_are_held_until_they_left_and_until_they_are_used() -> None:
    """4 bytes at 2 bytes/s and 1 s of latency; see the times beside each entry."""
    timeline = simulate(Schedule("gpipe", 2, 2), make_profile(2, cut=4.0), Cluster.uniform(2, 2.0, latency_seconds=1.0))

    # Rank 0 forwards 0-1 and 1-2; the link has message 0 from 1 to 3 and 1 from 3 to 5. Rank 1: 4-5, 6-7; backward 7-9
    # and 9-11, messages back arrive at 12 and 14. Rank 0: backwards 12-14 and 14-16.
    assert timeline.memory[0].buffers == ((1, 4), (2, 8), (3, 4), (5, 0), (12, 4), (14, 4), (16, 0))
    # Message 0 arrives at 4 and is used at once, 1 at 6; gradients leave 9-11 and 11-13.
    assert timeline.memory[1].buffers == ((4, 0), (6, 0), (9, 4), (11, 4), (13, 0))


def test_recomputation_keeps_inputs_and_one_whole_microbatch() -> None:
    """1f1b-flush, p = 3, m = 4: the inputs of those in flight, and 100 more during a backward."""
    plan = Plan.uniform(3, 3, "1f1b-flush", 4, recompute=True)
    timeline = simulate(plan, make_profile(3, saved=100.0, cut=7.0), instant(3))
    peaks = [most(memory.activations) for memory in timeline.memory]

    assert peaks == [100, 2 * 7 + 100, 7 + 100]


@pytest.mark.parametrize(("replicas", "split"), [(2, False), (2, True)])
def test_replicas_share_microbatches_whole_or_in_parts(replicas: int, split: bool) -> None:
    profile = make_profile(2, saved=12.0, weights=5.0)
    stages = (Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3)))
    plan = Plan(stages, "gpipe", 8, routing="split" if split else "round-robin")
    timeline = simulate(plan, profile, instant(4))

    # Half of 8 microbatches, or half of each.
    assert [most(memory.activations) for memory in timeline.memory] == [8 * 6] * 4
    assert [memory.weight_bytes for memory in timeline.memory] == [5] * 4


@settings(max_examples=60, deadline=None)
@given(problems(), *[st.lists(st.integers(0, 9).map(float), min_size=16, max_size=16)] * 2)
def test_equals_a_recount_at_every_moment(problem: tuple, saved: list[float], extra: list[float]) -> None:
    """At the middle of every stretch between two moments, count from the spans what is held then."""
    _, plan, bare, cluster, minibatches = problem
    layers = tuple(
        replace(one, saved_bytes=size, workspace_bytes=workspace)
        for one, size, workspace in zip(bare.layers, saved, extra, strict=False)
    )
    profile = Profile(layers, 1)
    timeline = simulate(plan, profile, cluster, minibatches)
    played = schedule(plan)
    programs = played.program(minibatches)
    share = [len(stage.ranks) if plan.routing == "split" else 1 for stage in plan.stages]
    whole = [sum(layer.saved_bytes for layer in profile.layers[stage.start : stage.stop]) for stage in plan.stages]
    most = [
        momentary(profile.layers[stage.start : stage.stop], index in plan.recomputed)
        for index, stage in enumerate(plan.stages)
    ]
    spans = iter(timeline.spans)
    for rank, row in enumerate(programs):
        own = [next(spans) for _ in row]
        stays: list[tuple[float, float, float]] = []
        forwards: dict[tuple[int, int], float] = {}
        kept: dict[tuple[int, int], float] = {}
        for action, span in zip(row, own, strict=True):
            if isinstance(action, Forward | Recompute | Backward | BackwardInput | BackwardWeight):
                stays.append((span.start_seconds, span.stop_seconds, most[action.stage] / share[action.stage]))
            if isinstance(action, Forward):
                forwards[action.stage, action.microbatch] = span.start_seconds
            if isinstance(action, Recompute):
                kept[action.stage, action.microbatch] = span.start_seconds
            if isinstance(action, WeightGradients):
                size = whole[action.stage] / share[action.stage]
                begin = forwards[action.stage, action.microbatch]
                stays.append((kept.get((action.stage, action.microbatch), begin), span.stop_seconds, size))
                if action.stage and action.stage in plan.recomputed:
                    cut = profile.layers[plan.stages[action.stage].start - 1].cut_bytes / share[action.stage]
                    stays.append((begin, span.stop_seconds, cut))
        check_course(timeline.memory[rank], stays)


def momentary(layers: Sequence[LayerProfile], recompute: bool) -> float:
    """The most that a stage of `layers` holds while one of them is at work, less all that it saves."""
    if recompute:
        return max(layer.workspace_bytes for layer in layers)
    saved = sum(layer.saved_bytes for layer in layers)
    held = [layers[-1].workspace_bytes]
    for index, layer in enumerate(layers[:-1], 1):
        own = sum(before.saved_bytes for before in layers[:index])
        # The gradient of what it hands on finds room where the next layers had saved something.
        held.append(layer.workspace_bytes + min(own + layer.cut_bytes, saved) - saved)
    return max(0.0, *held)


def test_a_workspace_takes_the_room_of_layers_that_are_not_at_work() -> None:
    """Layers of 5, 6 and 3 saved bytes: the second, at work, needs 6 and the gradient of what it hands on, 1, where the
    third one saves 3.
    """
    made = make_profile(3, cut=1.0)
    sizes = [(5.0, 4.0), (6.0, 6.0), (3.0, 2.0)]
    layers = tuple(
        replace(layer, saved_bytes=saved, workspace_bytes=workspace)
        for layer, (saved, workspace) in zip(made.layers, sizes, strict=True)
    )
    timeline = simulate(Plan.uniform(3, 1, "gpipe", 1), Profile(layers, 1), instant(1))

    assert most(timeline.memory[0].activations) == 5 + 6 + 6 + 1


def check_course(memory: RankMemory, stays: list[tuple[float, float, float]]) -> None:
    timer = sorted({moment for begin, end, _ in stays for moment in (begin, end)})
    for earlier, later in pairwise(timer):
        middle = (earlier + later) / 2
        if not earlier < middle < later:
            continue
        expected = sum(size for begin, end, size in stays if begin <= middle < end)
        found = [size for moment, size in memory.activations if moment <= middle]
        assert (found[-1] if found else 0.0) == pytest.approx(expected, abs=1e-9)
