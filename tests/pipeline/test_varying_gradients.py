"""Data may decide which values that cross a cut have a gradient, and two processes have the numbers of one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support.processes import Pool
from support.transport_selection import sharing_memory

WIDTH = 4
GRADIENT_LATER = ("zeros at first", "detached")
"""The kinds whose second value has a gradient for negative samples only, of which the first microbatch has none."""


def _make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    targets = [torch.randn(8, WIDTH, dtype=torch.float64, generator=generator) for _ in range(5)]
    signs = [(1, -1, 1, -1), (-1, 1, -1, -1), (-1, -1, -1, -1), (1, 1, 1, 1), (-1, -1, 1, 1)]
    return [
        (torch.cat([sign * (1 + target[:2].abs()) for sign in row]), target)
        for row, target in zip(signs, targets, strict=True)
    ]


BATCHES = _make_batches()


class Makes(nn.Module):
    """Makes a second value, which `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        side = self.side(x)
        chosen = bool(x.sum() > 0)
        if self.kind in ("zeros", "zeros at first") and chosen == (self.kind == "zeros at first"):
            side = torch.zeros_like(x)
        if self.kind == "detached" and chosen:
            side = side.detach()
        return torch.tanh(self.main(x)), side


class Reads(nn.Module):
    """Reads both values, or only the first for some data."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        x, side = values
        chosen = bool(side.sum() > 0)
        if self.kind in ("unread", "unread at first") and chosen == (self.kind == "unread"):
            return self.last(x)
        if self.kind == "without gradient" and chosen:
            side = side.detach()
        if self.kind == "scaled" and chosen:
            return self.last(x) + side[:, :1].detach()
        return self.last(x + side)


@dataclass(frozen=True)
class VaryingRun:
    """A training of two stages under `schedule`."""

    kind: str
    schedule: str = "1f1b-flush"
    shares_memory: bool = True
    wire_dtype: torch.dtype | None = None
    row: int | None = None
    """The first row of the captured sample; by default one for which the second value has a gradient."""

    @property
    def options(self) -> dict[str, Any]:
        row = self.row if self.row is not None else 2 * (self.kind in GRADIENT_LATER)
        return {
            "sample": (BATCHES[0][0][row : row + 2],),
            "loss_fn": F.mse_loss,
            # A weight without a gradient keeps its value and its momentum, and one with a gradient of zero does not.
            "optimizer": lambda params: torch.optim.AdamW(params, lr=0.05, weight_decay=0.1),
            "microbatches": 4,
            "stages": 2,
            "schedule": self.schedule,
            "wire_dtype": self.wire_dtype,
        }

    def build(self) -> nn.Sequential:
        torch.manual_seed(7)
        return nn.Sequential(Makes(self.kind), Reads(self.kind)).double()


def reference(run: VaryingRun) -> tuple[list[float], dict[str, Tensor]]:
    found = penstock.reference_train(run.build(), BATCHES, **run.options)
    return list(found.losses), dict(found.state)


def train(run: VaryingRun, tensor_parallel: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    options = dict(run.options)
    if tensor_parallel > 1:
        # All of a rank compute the same.
        options |= {"tensor_parallel": tensor_parallel, "parallelize": lambda stage, mesh: None}
    with sharing_memory(run.shares_memory), penstock.Pipeline(run.build(), **options) as pipe:
        losses = [float(pipe.step(x, y).loss) for x, y in BATCHES]
        pipe.drain()
        return losses, pipe.state_dict()["model"]


def compare(expected: tuple[list[float], dict[str, Tensor]], answers: list[Any]) -> None:
    """Asserts that the processes, together, have the losses and the weights of the oracle."""
    losses, weights = expected
    found = {name: weight for _, state in answers for name, weight in state.items()}
    assert [each for each, _ in answers] == [losses] * len(answers)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


def refused(run: VaryingRun) -> str:
    """The error of a training, in the process that has one."""
    try:
        train(run)
    except penstock.PenstockError as error:
        return str(error)
    return ""


class Masks(nn.Module):
    """Returns what it computes, and a mask that no parameter reaches."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last = last
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Any) -> tuple[Tensor, Tensor]:
        x, mask = values if self.last else (values, torch.ones_like(values))
        return self.linear(x), mask


def selected(_: None) -> list[list[bool]]:
    """Which outputs require a gradient where the loss reads them, for each microbatch of a training of two stages."""
    found: list[list[bool]] = []

    def loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        found.append([output.requires_grad for output in outputs])
        return F.mse_loss(outputs[0] * outputs[1], target)

    torch.manual_seed(7)
    model = nn.Sequential(Masks(last=False), Masks(last=True)).double()
    options = {**VaryingRun("zeros").options, "loss_fn": loss, "check": "off"}
    with penstock.Pipeline(model, **options) as pipe:
        pipe.step(*BATCHES[0])
        pipe.drain()
    return found


KINDS = ("zeros", "zeros at first", "detached", "unread", "unread at first", "without gradient", "scaled")
RUNS = [
    *(VaryingRun(kind) for kind in KINDS),
    *(VaryingRun(kind, shares_memory=False) for kind in KINDS),
    *(VaryingRun(kind, schedule) for kind, schedule in zip(KINDS[::3], ("zb-h1", "2bw", "gpipe"), strict=True)),
    *(VaryingRun(kind, wire_dtype=torch.bfloat16) for kind in KINDS[1::3]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_data_may_decide_which_gradients_cross_a_cut(pool: Pool, run: VaryingRun) -> None:
    expected = reference(run)
    # In one process nothing travels, by whichever way.
    for count in (1, 2) if run.shares_memory else (2,):
        compare(expected, pool.run(count, train, run))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("kind", ["unread at first", "without gradient"])
def test_so_do_they_with_tensor_parallel_members(pool: Pool, kind: str, shares_memory: bool) -> None:
    run = VaryingRun(kind, shares_memory=shares_memory)
    compare(reference(run), pool.run(4, train, run, 2))


@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", GRADIENT_LATER)
def test_a_gradient_that_the_sample_does_not_show_is_refused(
    pool: Pool, kind: str, wire_dtype: torch.dtype | None
) -> None:
    answers = pool.run(2, refused, VaryingRun(kind, wire_dtype=wire_dtype, row=0))
    assert any("with a gradient" in text and "pass a sample= for which they have one" in text for text in answers)
    if wire_dtype is None:
        # In one process nothing travels as bytes, and nothing must be agreed on.
        assert pool.run(1, refused, VaryingRun(kind, row=0)) == [""]


@pytest.mark.parametrize("count", [1, 2])
def test_a_value_that_no_parameter_reaches_requires_no_gradient_behind_a_cut(pool: Pool, count: int) -> None:
    assert [each for each in pool.run(count, selected, None) if each] == [[[True, False]] * 4]
