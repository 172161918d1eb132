"""What a step holds in memory: what the schedule promises, and nothing that grows."""

from functools import cache
from typing import TypeAlias

import pytest

from penstock.scheduling import Backward, BackwardInput, BackwardWeight, Forward
from penstock.scheduling.schedules import Schedule
from penstock.values.plans import schedule
from support.jobs.memory_jobs import Setting, observe, observe_all
from support.processes import Pool
from support.training import PAIRED, Case, count_tensors, stages_on_a_rank

SCHEDULES = ("gpipe", "1f1b-flush", "spp", "interleaved", "zb-h1", "zb-v", "pipedream", "vertical", "2bw")
COUNTS = ((1, 1, 1), (2, 1), (1, 2), (2, 2), (2, 3))


def allowed(setting: Setting) -> bool:
    """Whether the schedule takes these replicas."""
    equal = len(set(setting.replicas)) == 1
    return equal or (setting.schedule not in PAIRED and (setting.split or setting.schedule != "vertical"))


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


def counted(made: Schedule, rank: int, stage: int, ends: tuple[type, ...]) -> int:
    """The most microbatches of `stage` on `rank`, by its program, that had their forward and none of `ends` yet."""
    now = most = 0
    for action in made.program(3)[rank]:
        if isinstance(action, (Forward, *ends)) and action.stage == stage:
            now += 1 if isinstance(action, Forward) else -1
            most = max(most, now)
    return most


Peaks: TypeAlias = dict[int, dict[int, int]]
"""By stage and rank."""


def expected_peaks(setting: Setting) -> tuple[Peaks, Peaks]:
    """Checks microbatches in flight, that of some replica being what the schedule promises of the stage; and of graphs,
    which the input part of a backward in two parts uses up.
    """
    made = schedule(setting.plan)
    peaks, graphs = (
        {
            stage: {rank: counted(made, rank, stage, ends) for rank in ranks}
            for stage, ranks in enumerate(made.placement.stages)
        }
        for ends in ((Backward, BackwardWeight), (Backward, BackwardInput))
    )
    for stage, own in peaks.items():
        assert max(own.values()) == made.in_flight(stage), (setting, stage)
    return peaks, graphs


EVERY = settings(SCHEDULES, COUNTS)
IN_PROCESSES = {
    3: settings(("1f1b-flush", "zb-h1", "pipedream", "2bw"), ((2, 1), (1, 2))),
    4: settings(("gpipe", "interleaved", "zb-v", "vertical", "2bw"), ((2, 2),)),
}
"""By the number of processes."""


observed = cache(observe)


@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_activations_in_flight_are_those_of_the_schedule(setting: Setting) -> None:
    peaks, graphs = expected_peaks(setting)

    assert observed(setting).peaks == {stage: sorted(own.values()) for stage, own in peaks.items()}
    assert observed(setting).graphs == {stage: sorted(own.values()) for stage, own in graphs.items()}


@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_weight_versions_are_those_of_the_schedule(setting: Setting) -> None:
    made = schedule(setting.plan)

    # Replicas in one process share their weights.
    assert observed(setting).weights == sum(made.versions(stage) for stage in range(made.stages))


@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_live_tensors_are_constant_from_step_to_step(setting: Setting) -> None:
    assert len(set(observed(setting).live[2:])) == 1, observed(setting).live


@pytest.mark.slow
@pytest.mark.parametrize("ranks", IN_PROCESSES)
def test_each_process_holds_what_the_schedule_promises_of_its_rank(pool: Pool, ranks: int) -> None:
    outcomes = pool.run(ranks, observe_all, IN_PROCESSES[ranks])
    for index, setting in enumerate(IN_PROCESSES[ranks]):
        made, expected = schedule(setting.plan), expected_peaks(setting)
        for rank, found in enumerate(row[index] for row in outcomes):
            held = made.stages_of(rank)

            assert found.peaks == {stage: [expected[0][stage][rank]] for stage in held}, (setting, rank)
            assert found.graphs == {stage: [expected[1][stage][rank]] for stage in held}, (setting, rank)
            # The stages of other ranks keep the model's own weights.
            others = made.stages - len(held)
            assert found.weights == sum(made.versions(stage) for stage in held) + others, (setting, rank)
            # With what the transport holds of messages and sums on their way.
            assert len(set(found.live[2:])) == 1, (setting, rank, found.live)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_optimizers_and_buffers_add_no_tensors_from_step_to_step(schedule: str) -> None:
    counts = count_tensors(Case("normalized", schedule, 2, 4, "adamw", stages_on_a_rank(schedule)), 7)

    assert len(set(counts[3:])) == 1, counts


def test_optimizers_and_buffers_add_no_tensors_in_several_processes(pool: Pool) -> None:
    for name in ("pipedream", "zb-v"):
        case = Case("normalized", name, 2, 4, "adamw", stages_on_a_rank(name))
        for counts in pool.run(2, count_tensors, case, 7):
            assert len(set(counts[3:])) == 1, counts
