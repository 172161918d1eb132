"""What a step holds in memory: what the schedule promises, and nothing that grows."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.runtime.assembly.partial_models import old_numbers
from penstock.runtime.execution.executor import StageExecutor
from penstock.scheduling import Backward, BackwardInput, BackwardWeight, Forward
from penstock.scheduling.schedules import Schedule
from penstock.values.plans import schedule
from support import models
from support.fork_server import ForkServer
from support.live_tensors import count_at_rest, forget_what_is_there, live_tensors
from support.paths import SCRIPTS
from support.processes import Pool
from support.training import PAIRED, Case, count_tensors, stages_on_a_rank

SCHEDULES = ("gpipe", "1f1b-flush", "spp", "interleaved", "zb-h1", "zb-v", "pipedream", "vertical", "2bw")
COUNTS = ((1, 1, 1), (2, 1), (1, 2), (2, 2), (2, 3))


WIDTH = 13
"""No other test uses it."""
MICROBATCHES = 12
"""As many as three replicas and two ranks of a pipeline divide."""

alive: Counter[tuple[int, int]] = Counter()
peak: Counter[tuple[int, int]] = Counter()
executors: dict[tuple[int, int], StageExecutor] = {}
"""Those of the pipeline at hand."""
held: Counter[tuple[int, int]] = Counter()
"""The most microbatches that an executor has had, together with the one that goes forward."""


class Token:
    """Lives as long as the graph of one forward of one layer on one replica."""

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        alive[key] += 1
        peak[key] = max(peak[key], alive[key])

    def __del__(self) -> None:
        alive[self.key] -= 1


class Marked(torch.autograd.Function):
    """The identity; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, key: tuple[int, int]) -> Tensor:
        ctx.token = Token(key)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Layer(nn.Module):
    """A linear layer. Its buffer tells the replicas apart, since each has its own."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("own", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        key = self.layer, self.own.data_ptr()
        if key in executors:
            held[key] = max(held[key], len(executors[key].in_flight) + 1)
        return Marked.apply(self.linear(x), key)


@dataclass(frozen=True)
class Setting:
    """One layer for each stage; `schedule` 'vertical' is `pipedream` with vertical sync."""

    schedule: str
    replicas: tuple[int, ...]
    split: bool = False

    @property
    def plan(self) -> penstock.Plan:
        per_rank = stages_on_a_rank(self.schedule)
        stages = len(self.replicas) * per_rank
        plan = penstock.Plan.uniform(
            stages,
            stages,
            schedule="pipedream" if self.schedule == "vertical" else self.schedule,
            microbatches=MICROBATCHES,
            stages_per_rank=per_rank,
            vertical_sync=self.schedule == "vertical",
        )
        groups = [tuple(range(*span)) for span in pairwise(accumulate(self.replicas, initial=0))]
        placed = tuple(penstock.Stage(s.start, s.stop, groups[s.ranks[0]]) for s in plan.stages)
        return replace(plan, stages=placed, routing="split" if self.split else "round-robin")


@dataclass(frozen=True)
class Observed:
    peaks: dict[int, list[int]]
    """By stage: of each replica here, the most microbatches in flight; ascending."""
    graphs: dict[int, list[int]]
    """And the most of autograd's graphs."""
    weights: int
    """Tensors of a weight's shape after the drain, each storage once."""
    live: list[int]
    """Tensors alive after each step."""


def observe(setting: Setting, steps: int = 5) -> Observed:
    """Trains some steps; all ranks here, or this process's."""
    forget_what_is_there()
    return _observe(setting, steps)


def observe_all(settings: list[Setting]) -> list[Observed]:
    return [observe(setting) for setting in settings]


def _observe(setting: Setting, steps: int) -> Observed:
    torch.manual_seed(0)
    plan = setting.plan
    model = nn.Sequential(*(Layer(index) for index in range(len(plan.stages))))
    x = torch.randn(3 * MICROBATCHES, WIDTH)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": models.plain, "plan": plan}
    # The comparison of the first batch would run the layers of all stages.
    pipe = penstock.Pipeline(model, sample=(x[:1],), check="off", **options)
    # Capture has run the layers too.
    peak.clear()
    held.clear()
    executors.clear()
    for stages in pipe._engine.stages.values():
        for index, stage in stages.items():
            executors[index, stage.weights.buffers[0].data_ptr()] = stage.executor
    live: list[int] = []
    for _ in range(steps):
        float(pipe.step(x, x).loss)
        live.append(count_at_rest(live[2:]))
    pipe.drain()
    with old_numbers(model):
        weights = {t.data_ptr() for t in live_tensors() if t.shape == (WIDTH, WIDTH)}
    left = [key for key, count in alive.items() if count]
    assert not left, f"graphs of {left} are alive after the drain"
    executors.clear()
    pipe.close()
    return Observed(_by_stage(held), _by_stage(peak), len(weights), live)


def _by_stage(most: Mapping[tuple[int, int], int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for (stage, _), count in most.items():
        found[stage] = sorted([*found.get(stage, []), count])
    return found


def allowed(setting: Setting) -> bool:
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


@pytest.mark.sampled(12)
@pytest.mark.parametrize("setting", EVERY, ids=ident)
def test_a_step_holds_what_the_schedule_promises(setting: Setting) -> None:
    """Activations and versions of weights; and the tensors that are alive are as many after every step."""
    found, made, (peaks, graphs) = observe(setting), schedule(setting.plan), expected_peaks(setting)

    assert found.peaks == {stage: sorted(own.values()) for stage, own in peaks.items()}
    assert found.graphs == {stage: sorted(own.values()) for stage, own in graphs.items()}
    # Replicas in one process share their weights.
    assert found.weights == sum(made.versions(stage) for stage in range(made.stages))
    assert len(set(found.live[2:])) == 1, found.live


@pytest.mark.sampled(1)
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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_optimizers_and_buffers_add_no_tensors_from_step_to_step(schedule: str) -> None:
    counts = count_tensors(Case("normalized", schedule, 2, 4, "adamw", stages_on_a_rank(schedule)), 7)

    assert len(set(counts[3:])) == 1, counts


def test_optimizers_and_buffers_add_no_tensors_in_several_processes(pool: Pool) -> None:
    for name in ("pipedream", "zb-v"):
        case = Case("normalized", name, 2, 4, "adamw", stages_on_a_rank(name))
        for counts in pool.run(2, count_tensors, case, 7):
            assert len(set(counts[3:])) == 1, counts


SCRIPT = SCRIPTS / "resident_script.py"
MESSAGE_BYTES = 1024 * 256 * 4
"""Of the activations, or of their gradients, between the two stages of the script."""


def measure(fork_server: ForkServer, schedule: str, microbatches: int) -> list[tuple[int, int]]:
    """By rank of two: the peak, and the gradients of weights."""
    processes = fork_server.start_ranks([str(SCRIPT), schedule, str(microbatches)], 2)
    outputs = [process.communicate()[0].split() for process in processes]
    return [(int(peak), int(gradients)) for peak, gradients in outputs]


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_a_flush_holds_what_is_in_flight_and_not_the_minibatch(fork_server: ForkServer) -> None:
    single, double = (measure(fork_server, "gpipe", microbatches) for microbatches in (1, 2))
    made = Schedule("1f1b-flush", 2, 16)
    for rank, (peak, gradients) in enumerate(measure(fork_server, "1f1b-flush", 16)):
        one = double[rank][0] - single[rank][0]
        # From the second microbatch on there are gradients beside the activations.
        expected = single[rank][0] + (made.in_flight(rank) - 1) * one + gradients

        # On a busy machine the message of a microbatch may come before the microbatch is due.
        assert 0.9 * expected <= peak <= 1.1 * expected + MESSAGE_BYTES
