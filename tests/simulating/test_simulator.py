"""The simulator against closed forms and timelines made by hand."""

from dataclasses import replace

import pytest

from penstock.errors import PlanError, ScheduleError
from penstock.scheduling.actions import parse_programs
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.simulating import Costs, default_minibatches, execute, simulate
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile


def make_profile(*layers: tuple[float, float, float, float]) -> Profile:
    """Layers of (forward seconds, backward seconds, cut bytes, parameter bytes)."""
    return Profile(
        tuple(LayerProfile(f"l{i}", f, b, cut, 0, weights) for i, (f, b, cut, weights) in enumerate(layers)), 8
    )


def uniform_profile(layers: int, forward: float = 1.0, backward: float = 2.0) -> Profile:
    return make_profile(*[(forward, backward, 0.0, 0.0)] * layers)


def instant(ranks: int) -> Cluster:
    return Cluster.uniform(ranks, float("inf"))


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 16])
def test_flush_takes_the_time_of_the_closed_form(method: str, ranks: int, microbatches: int) -> None:
    """Thesis, section 1.4: (m + p - 1)(tf + tb), so that (p - 1)/(m + p - 1) of the wall time is idle."""
    schedule = Schedule(method, ranks, microbatches)
    for minibatches in (1, 3):
        timeline = simulate(schedule, uniform_profile(ranks), instant(ranks), minibatches)

        assert timeline.seconds == minibatches * 3 * (microbatches + ranks - 1)
        assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-15)


@pytest.mark.parametrize(("p", "v", "m"), [(4, 2, 8), (4, 2, 4), (4, 4, 16), (8, 3, 24), (2, 2, 4), (4, 2, 12)])
def test_interleaving_divides_the_bubble(p: int, v: int, m: int) -> None:
    """Thesis, section 4.2: m (tf + tb) + (p - 1)(tf + tb)/v, with tf and tb those of a rank's v stages together."""
    timeline = simulate(Schedule("interleaved", p, m, v), uniform_profile(p * v), instant(p))

    assert timeline.seconds == 3 * v * m + 3 * (p - 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("forward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("method", "microbatches"), [("pipedream", 1), ("pipedream", 8), ("2bw", 4), ("2bw", 8)])
def test_asynchronous_schedules_idle_in_fill_and_drain_only(method: str, microbatches: int, forward: float) -> None:
    schedule = Schedule(method, 4, microbatches)
    profile = uniform_profile(4, forward, 2.0)
    previous = 1.0
    for minibatches in (8, 32, 128):
        timeline = simulate(schedule, profile, instant(4), minibatches)
        work = minibatches * microbatches * (forward + 2)

        assert timeline.seconds == work + 3 * (forward + 2)
        assert timeline.bubble == pytest.approx(1 - work / timeline.seconds, abs=1e-12)
        assert timeline.steady_bubble == pytest.approx(0, abs=1e-12)
        assert timeline.bubble < previous
        previous = timeline.bubble


def spans_of(timeline: object) -> list[tuple[int, str, float, float]]:
    return [(s.rank, s.action, s.start_seconds, s.stop_seconds) for s in timeline.spans]  # type: ignore[attr-defined]


def test_two_stages_by_hand() -> None:
    """Activations take 4 s and gradients 8 s (the way back is half as fast), so the second activation queues."""
    profile = make_profile((1, 2, 40, 6), (3, 4, 0, 10))
    cluster = Cluster.from_matrix([[0, 10], [5, 0]])
    timeline = simulate(Schedule("gpipe", 2, 2), profile, cluster, update_seconds_per_byte=0.5)
    # As many seconds that were measured, layer by layer.
    layers = (replace(layer, update_seconds=0.5 * layer.parameter_bytes) for layer in profile.layers)
    assert simulate(Schedule("gpipe", 2, 2), replace(profile, layers=tuple(layers)), cluster) == timeline

    assert spans_of(timeline) == [
        (0, "0F0@0", 0, 1),
        (0, "0S0>1", 1, 5),
        (0, "0F1@0", 1, 2),
        (0, "0S1>1", 5, 9),
        (0, "0R0<1", 2, 24),
        (0, "0B0@0", 24, 26),
        (0, "0R1<1", 26, 32),
        (0, "0B1@0", 32, 34),
        (0, "0U1<0", 34, 37),
        (1, "1R0<0", 0, 5),
        (1, "1F0@0", 5, 8),
        (1, "1R1<0", 8, 9),
        (1, "1F1@0", 9, 12),
        (1, "1B0@0", 12, 16),
        (1, "1S0>0", 16, 24),
        (1, "1B1@0", 16, 20),
        (1, "1S1>0", 24, 32),
        (1, "1U1<0", 20, 25),
    ]
    assert (timeline.seconds, timeline.busy_seconds(0), timeline.busy_seconds(1)) == (37, 9, 19)


def test_a_recomputation_fills_the_wait_for_a_gradient() -> None:
    """The last stage ends its forwards at 7 s and takes 3 s for each of 4 microbatches. The others have recomputed the
    last one when its gradient comes.
    """
    plan = Plan.uniform(4, 4, schedule="gpipe", microbatches=4, recompute=True)

    assert simulate(plan, uniform_profile(4), instant(4)).seconds == 7 + 4 * 3 + 3 * 2


def test_plan_gives_the_layers_and_a_schedule_splits_them_evenly() -> None:
    profile = make_profile(*[(float(2**i), 0.0, 0.0, 0.0) for i in range(5)])
    plan = Plan.uniform(5, 2, schedule="gpipe")

    assert simulate(plan, profile, instant(2)) == simulate(Schedule("gpipe", 2, 1), profile, instant(2))
    assert [span.seconds for span in simulate(plan, profile, instant(2)).spans if span.kind == "forward"] == [7, 24]


def test_inference_is_forwards_only() -> None:
    timeline = simulate(inference(2, 2, 3), uniform_profile(4), instant(2))

    assert {span.kind for span in timeline.spans if span.computes} == {"forward"}


def test_tied_gradients_wait_for_their_partner() -> None:
    schedule = Schedule("gpipe", 3, 1, ties=((0, 2),))
    timeline = simulate(schedule, uniform_profile(3), instant(3))
    updates = {span.stage: span.start_seconds for span in timeline.spans if span.kind == "update"}

    # Stages 0 and 2 update when the later of them, stage 0, has its gradients.
    assert updates == {0: 9, 1: 7, 2: 9}


@pytest.mark.parametrize(
    ("method", "ranks", "microbatches", "expected"),
    [("gpipe", 4, 8, 1), ("interleaved", 4, 8, 1), ("pipedream", 4, 1, 8), ("pipedream", 4, 8, 1), ("2bw", 4, 4, 2)],
)
def test_default_minibatches_show_what_a_schedule_does(
    method: str, ranks: int, microbatches: int, expected: int
) -> None:
    schedule = Schedule(method, ranks, microbatches, 2 if method == "interleaved" else 1)

    assert default_minibatches(schedule) == expected
    assert default_minibatches(schedule, 5) == 5


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "0R0<1 0F0@0 0S0>1\n1R0<0 1F0@0 1S0>0",
            "the schedule cannot run: rank 0 waits in 0R0<1 (its action 0) for a message that is never sent; "
            "rank 1 waits in 1R0<0 (its action 0) for a message that is never sent. Put the sends before the "
            "receives that need them; penstock.verify shows the rows",
        ),
        (
            "0F0@0 0S0>1 0F1@0 0S1>1\n1R1<0 1F1@0",
            "rank 1: expected the message of 1R1<0 to be next on the link to it, found that of 0 from stage 0 to "
            "stage 1: receive in the order of the sends",
        ),
    ],
)
def test_schedule_that_cannot_run_is_refused(program: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        execute(parse_programs(program), Placement.straight(2), Costs.unit(2))

    assert str(caught.value) == message


def test_no_minibatches_are_refused() -> None:
    with pytest.raises(ScheduleError, match="minibatches: expected a whole number, 1 or more, found 0"):
        simulate(Schedule("gpipe", 2, 2), uniform_profile(2), instant(2), 0)


@pytest.mark.parametrize(
    ("plan", "layers", "devices", "message"),
    [
        (Plan.uniform(4, 2), 5, 2, "the plan has layers 0 to 3 and the profile '' has 5 layers: expected the same"),
        (Plan.uniform(4, 2, microbatch_size=4), 4, 2, "measured with 8 samples and the plan has 4: expected the same"),
        (Plan.uniform(4, 2), 4, 1, "the plan has 2 ranks and the cluster 1 device: expected one each"),
    ],
)
def test_what_does_not_fit_is_refused(plan: Plan, layers: int, devices: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(plan, uniform_profile(layers), instant(devices))


def test_costs_need_a_number_for_every_stage() -> None:
    with pytest.raises(PlanError, match="costs of 2 stages: expected 1 cut_bytes, found 2: give one each"):
        Costs((1.0, 1.0), (1.0, 1.0), cut_bytes=(0.0, 0.0))
