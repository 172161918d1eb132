"""Stages recorded as CUDA graphs: the numbers of those that are not, in memory for the microbatches in flight only.

``pytest -m gpu`` where there is a GPU.
"""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.jobs.gpu_jobs import run_compiled_aside
from support.jobs.replay_jobs import run_compiled
from support.layers import Several
from support.outcome_comparisons import assert_close
from support.processes import Pool
from support.training import Case, stages_on_a_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # PyTorch raises it in itself and hides it from itself, but for those who make errors of warnings.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

DEVICE = "cuda:0"
GRAPHED = {"mode": "reduce-overhead", "backend": "aot_eager"}
COMPILED = {"backend": "aot_eager"}
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "spp")
MEBIBYTE = 2**20
NEAR = 1e-9
"""CUDA kernels add in an order that is theirs to choose."""


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Before or after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def case_of(schedule: str, **more: Any) -> Case:
    return Case("skipping", schedule, 2, 4, "adamw", stages_on_a_rank(schedule), device=DEVICE, **more)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_process(schedule: str) -> None:
    case = case_of(schedule, turned=True)
    expected, actual = run_compiled(case, COMPILED), run_compiled(case, GRAPHED)

    assert_close(expected, actual, NEAR)
    assert actual.evaluated == pytest.approx(expected.evaluated, rel=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_share_the_device(pool: Pool, schedule: str) -> None:
    expected = run_compiled(case_of(schedule), COMPILED)
    for part in pool.run(2, run_compiled_aside, case_of(schedule), GRAPHED):
        assert_close(expected, part, NEAR)


def test_steps_and_microbatches_of_several_sizes() -> None:
    case = case_of("gpipe", samples=(16, 13, 16, 7))

    assert_close(run_compiled(case, COMPILED), run_compiled(case, GRAPHED), NEAR)


def test_replicas() -> None:
    case = case_of("1f1b-flush", replicas=(2, 1))

    assert_close(run_compiled(case, COMPILED), run_compiled(case, GRAPHED), NEAR)


def train(layers: list[nn.Module], compile: dict[str, Any], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    built = [layer.to(DEVICE) for layer in layers]
    batches = [(x.to(DEVICE, torch.float32), y.to(DEVICE)) for x, y in models.LAYERED.batches]
    wishes = {"stages": 2, "microbatches": 4, "schedule": "1f1b-flush", **options}
    pipe = penstock.Pipeline(built, (batches[0][0][:4],), F.cross_entropy, models.momentum, compile=compile, **wishes)
    losses = [float(pipe.step(x, y).loss) for x, y in batches]
    state = {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}
    pipe.close()
    return losses, state


def small() -> list[nn.Module]:
    """With buffers, integers, and two weights that are one."""
    torch.manual_seed(5)
    first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    return [first, Several(), Joining(), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), last, nn.Linear(6, 3)]


class Joining(nn.Module):
    """Reads what `Several` makes."""

    def forward(self, y: Tensor, size: Tensor, index: Tensor) -> Tensor:
        return y * size + index.to(y.dtype).mean()


# Inductor has advice on other settings.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_inductor_and_autocast(low: torch.dtype | None) -> None:
    """One compiler, and so the same kernels: with graphs and without."""
    options = {"autocast": low, "version_dtype": low}
    expected = train(small(), {"mode": "default"}, **options)
    actual = train(small(), {"mode": "reduce-overhead"}, **options)

    tolerance = 1e-5 if low is None else 2e-2
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, tensor in actual[1].items():
        torch.testing.assert_close(tensor, expected[1][name], rtol=tolerance, atol=tolerance, msg=name)


def taken(microbatches: int, compile: dict[str, Any]) -> int:
    """The most memory that a pipeline holds with this number of large microbatches in flight."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()).to(DEVICE) for _ in range(8)]
    x = torch.randn(microbatches * 2**15, 256, device=DEVICE)
    pipe = penstock.Pipeline(
        layers,
        (x[: 2**15],),
        F.mse_loss,
        models.plain,
        schedule="gpipe",
        microbatches=microbatches,
        stages=2,
        compile=compile,
    )
    for _ in range(2):
        float(pipe.step(x, torch.zeros_like(x)).loss)
    pipe.close()
    del pipe
    return torch.cuda.max_memory_reserved() - before


def test_memory_grows_with_the_microbatches_in_flight_as_without_graphs() -> None:
    """Each of them saves eight tensors of 32 MiB; what two stages receive is there twice, and more passes by."""
    without = taken(6, COMPILED) - taken(2, COMPILED)
    within = taken(6, GRAPHED) - taken(2, GRAPHED)

    assert without > 4 * 8 * 32 * MEBIBYTE * 0.8
    assert within < 1.8 * without
