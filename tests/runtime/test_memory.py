"""What a step holds in memory: what the schedule promises, and nothing that grows."""

from functools import cache

import pytest

from memory_jobs import Setting, observe, observe_all
from penstock.scheduling import Backward, Forward, schedule
from penstock.scheduling.schedules import Schedule
from processes import Pool
from training import Case, count_tensors

SCHEDULES = ("gpipe", "1f1b-flush", "spp", "interleaved", "1f1b", "vertical", "2bw")
COUNTS = ((1, 1, 1), (2, 1), (1, 2), (2, 2), (2, 3))


def allowed(setting: Setting) -> bool:
    """Whether the schedule takes these replicas."""
    equal = len(set(setting.replicas)) == 1
    return equal or (setting.schedule != "interleaved" and (setting.split or setting.schedule != "vertical"))


def settings(schedules: tuple[str, ...], counts: tuple[tuple[int, ...], ...]) -> list[Setting]:
    """Both ways to share microbatches."""
    made = [
        Setting(schedule, replicas, split)
        for schedule in schedules
        for replicas in counts
        for split in ((False, True) if max(replicas) > 1 else (False,))
    ]
    return [setting for setting in made if allowed(setting)]


def ident(setting: Setting) -> str:
    return f"{setting.schedule}-{setting.replicas}{'-split' if setting.split else ''}"


def counted_in_flight(made: Schedule, rank: int, stage: int) -> int:
    """The most microbatches of `stage` that `rank` has in flight, by its program."""
    now = most = 0
    for action in made.program(3)[rank]:
        if isinstance(action, Forward | Backward) and action.stage == stage:
            now += 1 if isinstance(action, Forward) else -1
            most = max(most, now)
    return most


def expected_peaks(setting: Setting) -> dict[int, dict[int, int]]:
    """By stage and rank; that of some replica is what the schedule promises of the stage."""
    made = schedule(setting.plan)
    peaks = {
        stage: {rank: counted_in_flight(made, rank, stage) for rank in ranks}
        for stage, ranks in enumerate(made.placement.stages)
    }
    for stage, own in peaks.items():
        assert max(own.values()) == made.in_flight(stage), (setting, stage)
    return peaks


EVERY = settings(SCHEDULES, COUNTS)
IN_PROCESSES = {
    3: settings(("1f1b-flush", "1f1b", "2bw"), ((2, 1), (1, 2))),
    4: settings(("gpipe", "interleaved", "vertical", "2bw"), ((2, 2),)),
}
"""By the number of processes."""


observed = cache(observe)


@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_activations_in_flight_are_those_of_the_schedule(setting: Setting) -> None:
    expected = {stage: sorted(peaks.values()) for stage, peaks in expected_peaks(setting).items()}

    assert observed(setting).peaks == expected


@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_weight_versions_are_those_of_the_schedule(setting: Setting) -> None:
    made = schedule(setting.plan)

    # Replicas in one process share their weights.
    assert observed(setting).weights == sum(made.versions(stage) for stage in range(made.stages))


@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_live_tensors_are_constant_from_step_to_step(setting: Setting) -> None:
    assert len(set(observed(setting).live[2:])) == 1, observed(setting).live


@pytest.mark.parametrize("ranks", IN_PROCESSES)
def test_each_process_holds_what_the_schedule_promises_of_its_rank(pool: Pool, ranks: int) -> None:
    outcomes = pool.run(ranks, observe_all, IN_PROCESSES[ranks])
    for index, setting in enumerate(IN_PROCESSES[ranks]):
        made, expected = schedule(setting.plan), expected_peaks(setting)
        for rank, found in enumerate(row[index] for row in outcomes):
            held = made.stages_of(rank)

            assert found.peaks == {stage: [expected[stage][rank]] for stage in held}, (setting, rank)
            # The stages of other ranks keep the model's own weights.
            others = made.stages - len(held)
            assert found.weights == sum(made.versions(stage) for stage in held) + others, (setting, rank)
            # With what the transport holds of messages and sums on their way.
            assert len(set(found.live[2:])) == 1, (setting, rank, found.live)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_optimizers_and_buffers_add_no_tensors_from_step_to_step(schedule: str) -> None:
    interleaves = schedule == "interleaved"
    counts = count_tensors(Case("normalized", schedule, 2, 4, "adamw", stages_per_rank=2 if interleaves else 1), 7)

    assert len(set(counts[3:])) == 1, counts


def test_optimizers_and_buffers_add_no_tensors_in_several_processes(pool: Pool) -> None:
    for counts in pool.run(2, count_tensors, Case("normalized", "1f1b", 2, 4, "adamw"), 7):
        assert len(set(counts[3:])) == 1, counts
