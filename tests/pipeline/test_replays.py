"""Pipelines whose stages run by recordings train with the bits of one device."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models, skip_models
from support.jobs import tied_jobs
from support.jobs.replay_jobs import run_recorded, run_recorded_over
from support.layers import Gathering, InPlace, Several
from support.processes import Pool
from support.simulated.simulated_graph_capturer import GRAPHED, simulated_graph_capture
from support.training import Case, Outcome, assert_equal, run_reference, stages_on_a_rank

EAGER = {**GRAPHED, "backend": "eager"}
"""Which is quickly compiled."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Before or after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


CASES = [
    Case("perceptron", "gpipe", 2, 4),
    Case("perceptron", "1f1b-flush", 3, 6, "adamw"),
    Case("perceptron", "spp", 2, 4),
    Case("skipping", "interleaved", 2, 4, stages_per_rank=2, turned=True),
    Case("perceptron", "1f1b-flush", 2, 4, replicas=(2, 1)),
    Case("skipping", "1f1b-flush", 2, 4, replicas=(2, 2), split=True),
    # Steps of several sizes, which are cut into microbatches of several.
    Case("perceptron", "gpipe", 2, 4, samples=(16, 13, 16, 7)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.subject}-{case.schedule}")
def test_one_process(case: Case) -> None:
    assert_equal(run_reference(case), run_recorded(case, EAGER))


def test_compiled_code_is_recorded_and_compiled_once() -> None:
    case, graphs = Case("perceptron", "1f1b-flush", 2, 4), 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    assert_equal(run_reference(case), run_recorded(case, {**GRAPHED, "backend": count}))
    assert graphs == 2, "of two stages"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush", "interleaved"])
def test_there_are_as_many_recordings_as_microbatches_in_flight(schedule: str) -> None:
    case = Case("perceptron", schedule, 2, 4, stages_per_rank=stages_on_a_rank(schedule))
    with simulated_graph_capture() as made:
        pipe = penstock.Pipeline(case.build(), **case.options, compile=EAGER)
        for x, y in case.batches[:2]:
            pipe.step(x, y)
            pipe.evaluate(x, y)

    held = [stage for rank in range(2) for stage in pipe.schedule.stages_of(rank)]
    assert [recorder.captures for recorder in made] == [2 * pipe.schedule.in_flight(stage) for stage in held]
    assert [recorder.warm_ups for recorder in made] == [1] * len(held)


def test_a_model_that_makes_its_own_loss() -> None:
    """The last stage has one place, where all its losses lie one after the other."""
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1), OwnLoss()]
    compare([layer.double() for layer in layers], TARGET, loss_fn=lambda loss, target: (loss, {"twice": loss}))


class OwnLoss(nn.Module):
    """The mean of squares."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def compare(layers: Sequence[nn.Module], target: Tensor, **options: Any) -> None:
    """With recordings and without the numbers are the same."""
    x = models.LAYERED.batches[0][0]
    found = []
    for graphed in (False, True):
        torch.manual_seed(5)
        arguments = {
            "stages": 2,
            "microbatches": 4,
            "sample": (x[:4],),
            "optimizer": models.adamw,
            "loss_fn": F.cross_entropy,
        }
        arguments.update(options)
        with simulated_graph_capture() as made:
            pipe = penstock.Pipeline(copy.deepcopy(list(layers)), **arguments, compile=EAGER if graphed else False)
            steps = [float(pipe.step(x + number, target).loss) for number in range(3)]
        assert bool(made) == graphed
        found.append(([*steps, float(pipe.evaluate(x, target).loss)], pipe.state_dict()["model"]))
    assert found[0][0] == found[1][0]
    for name, tensor in found[0][1].items():
        assert torch.equal(tensor, found[1][1][name]), name


TARGET = models.LAYERED.batches[0][1]


def test_unusual_layers() -> None:
    """Buffers that are written, values that are written in place, integers, weights that are shared or frozen."""
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    middle = nn.Linear(6, 6).requires_grad_(False)
    norm = nn.BatchNorm1d(6)
    layers = [first, InPlace(), nn.ReLU(inplace=True), middle, Several(), Gathering(), norm, last, nn.Linear(6, 3)]
    compare([layer.double() for layer in layers], TARGET, schedule="gpipe")


def test_weights_that_forwards_read_in_a_lower_precision() -> None:
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)]
    for version_dtype in (None, torch.bfloat16):
        compare([Cast(), *layers], TARGET, autocast=torch.bfloat16, version_dtype=version_dtype)


class Cast(nn.Module):
    """To the type of the layers."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


@pytest.mark.parametrize("skips", ["direct", "relayed"])
def test_values_that_pass_stages_and_masks(skips: str) -> None:
    plan = penstock.Plan.uniform(8, 8, schedule="gpipe", microbatches=3)
    run = skip_models.Run(plan, ((), (0,), (), (0,), (2,), (0, 0), (1, 3)))
    with simulated_graph_capture():
        arguments = (run.build(), run.sample, F.mse_loss, models.adamw)
        pipe = penstock.Pipeline(*arguments, plan=plan, skips=skips, compile=EAGER)
    losses = [float(pipe.step(x, y).loss) for x, y in run.batches]
    expected, state = skip_models.run_reference(run)

    assert bool(pipe.schedule.skips) == (skips == "direct")
    assert_equal(Outcome(tuple(expected), state), Outcome(tuple(losses), pipe.state_dict()["model"]))


def test_tied_weights_and_clipping() -> None:
    run = tied_jobs.TiedRun(((0, 7), (2, 5)), (1, 1), 4, clips=True, flushes=True)
    with simulated_graph_capture():
        pipe = penstock.Pipeline(tied_jobs.build(run.shared), **run.options, compile=EAGER)
    losses = [float(pipe.step(*batch).loss) for batch in tied_jobs.BATCHES]
    assert_equal(tied_jobs.run_reference(run), Outcome(tuple(losses), pipe.state_dict()["model"]))


def test_two_processes(pool: Pool) -> None:
    """Messages wait in shared memory, and with Gloo, while the next microbatches are computed."""
    cases = [Case("skipping", "gpipe", 2, 8), Case("perceptron", "interleaved", 2, 4, stages_per_rank=2)]
    for case in cases:
        expected = run_reference(case)
        for shared in (True, False):
            for part in pool.run(2, run_recorded_over, case, EAGER, shared):
                assert_equal(expected, part)
