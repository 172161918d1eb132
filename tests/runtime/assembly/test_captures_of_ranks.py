"""Every rank captures the model, and one of them compares a capture with the model; an error of one ends all."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.capturing.doors import capture, draft
from penstock.errors import PenstockError
from support.processes import Pool

WIDTH = 4
RUNS: list[None] = []
"""One for every run of the first block in this process."""


class Block(nn.Module):
    """Counts its runs in what no model holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(None)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Summed(Block):
    """Waits for the other ranks in every run."""

    def compute(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        join(y)
        return y


def join(tensor: Tensor) -> None:
    if dist.is_initialized():
        dist.all_reduce(tensor.detach().clone())


class Joined(Block):
    """Waits for the other ranks whenever its gradient is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(join)


class Failing(Block):
    """Fails where gradients are computed, which capture does first when it checks."""

    def compute(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise ArithmeticError("no gradients here")
        return self.layer(x)


class Model(nn.Module):
    """A block, and code around it that does something else for one step, and that needs as many weights as steps."""

    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = block()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """`x`: (samples, steps, width); `weights`: (samples, steps)."""
        y: Tensor = self.last(self.block(x) * weights.unsqueeze(-1))
        return 2 * y if x.shape[1] == 1 else y


class Stateful(Model):
    """Reads a number between its blocks that other code changes: what is traced is wrong in the next run."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, weights) * len(RUNS)


class Doubled(Model):
    """Has the same layers, and twice as large numbers between them."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, 2 * weights)


class Undifferentiable(Model):
    """Leaves PyTorch between its blocks, which is refused before anything is checked."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, weights) + float(self.block(x).sum())


KINDS: dict[str, Any] = {
    "plain": Model,
    "summed": lambda: Model(Summed),
    "joined": lambda: Model(Joined),
    "failing": lambda: Model(Failing),
    "stateful": Stateful,
    "refused": Undifferentiable,
}


def sample() -> tuple[Tensor, Tensor]:
    """Two samples of five steps."""
    return torch.ones(2, 5, WIDTH), torch.ones(2, 5)


def inputs_of(kind: str) -> tuple[Any, Any, Any]:
    """What a capture finds: the sizes of inputs that it holds for, those that must be equal, and the values that have a
    gradient. In the other processes, that of a pipeline.
    """
    if dist.is_initialized():
        with pipeline_of(kind) as pipe:
            chain = pipe._chain
    else:
        chain = capture(KINDS[kind](), sample())
    return chain.inputs.sizes, chain.inputs.equal, [layer.differentiable for layer in chain.layers]


def pipeline_of(kind: str) -> penstock.Pipeline:
    """In two processes."""
    return penstock.Pipeline(
        KINDS[kind](),
        sample(),
        F.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=penstock.Plan.uniform(2, 2, "1f1b-flush", 2),
        timeout_seconds=60.0,
    )


def error_of(*kinds: str) -> str:
    """The error of a pipeline of the model of this rank's kind."""
    RUNS.clear()
    try:
        pipeline_of(kinds[dist.get_rank()])
    except PenstockError as error:
        kind = next(base for base in type(error).__mro__ if base.__module__ == PenstockError.__module__)
        return f"{kind.__name__}: {error}"
    except ArithmeticError as error:
        return f"its own: {error}"
    return ""


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param("summed", id="ranks wait for each other in the forward"),
        pytest.param("joined", id="ranks wait for each other in the backward"),
    ],
)
def test_every_rank_finds_what_one_process_does(pool: Pool, kind: str) -> None:
    sizes, equal, gradients = inputs_of("plain")

    assert pool.run(2, inputs_of, kind) == [(sizes, equal, gradients)] * 2
    # What the checks find is not trivial.
    assert any(least == 2 for bounds in sizes.values() for least, _ in bounds)
    assert equal
    assert all(gradients)


def shares(kind: str) -> tuple[bool, list[set[int]], int]:
    """Whether the text of a model's capture is that of another capture of it; the questions that each of three ranks
    asks; and how many there are.
    """
    made, again = (draft(KINDS[kind](), sample()) for _ in range(2))
    return made.text == again.text, [set(made.share_of(rank, 3)) for rank in range(3)], len(made.questions)


def test_one_rank_asks_for_all() -> None:
    same, found, questions = shares("plain")

    assert same
    # The comparison, a single sample, a single step, and the gradients.
    assert questions == 4
    assert found == [{0}, {1, 3}, {2}]
    assert shares("joined")[1] == [{0, 1, 2, 3}] * 3


def test_another_model_has_another_text() -> None:
    made = draft(Model(), sample())
    others = [Doubled(), Model(Joined), Model()]
    others[1].last = nn.Linear(WIDTH, WIDTH, bias=False)
    assert [draft(other, sample()).text == made.text for other in others] == [False, False, True]


def test_all_ranks_raise_what_one_finds(pool: Pool) -> None:
    first, last = pool.run(2, error_of, "stateful", "stateful")
    text = "the trace of Stateful differs from the model in output 0"

    assert first.startswith(f"CaptureError: {text}")
    assert last.startswith(f"CaptureError: rank 0, while it compared its capture with the model: {text}")


@pytest.mark.parametrize("kinds", [("plain", "refused"), ("refused", "plain"), ("plain", "stateful")])
def test_an_error_on_one_rank_ends_all(pool: Pool, kinds: tuple[str, str]) -> None:
    found = pool.run(2, error_of, *kinds)
    failed = next(rank for rank, kind in enumerate(kinds) if kind != "plain")

    assert found[failed].startswith("CaptureError: ")
    assert found[1 - failed].startswith(f"CaptureError: rank {failed}, while it ")


def test_an_error_of_the_model_in_a_check_ends_all(pool: Pool) -> None:
    first, last = pool.run(2, error_of, "failing", "plain")

    assert first == "its own: no gradients here"
    assert last.startswith("TransportError: rank 0 failed while it compared its capture with the model")
    assert "no gradients here" in last
