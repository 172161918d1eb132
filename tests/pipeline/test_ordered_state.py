"""What depends on the order of forwards and backwards, or on where memory lies: equal to a plain loop, or refused."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PlanError
from support.blocks import WIDTH, Block, Stack, assert_trains, batches, build, sgd, squares
from support.processes import Pool
from support.training import Outcome, assert_equal, train_by_loop

ROUNDS = batches((6, 5))


class Viewed(Block):
    """Returns a tensor and a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        # A sum, whose backward does not read it.
        y = super().forward(x) + 1.0
        return y, y[..., :2]


class Halving(Block):
    """Writes what it is given for some data, none of them in the sample."""

    def forward(self, x: Tensor, view: Tensor) -> Tensor:  # type: ignore[override]
        if view.mean() > -1.0 and len(x) != len(ROUNDS[0][0]):
            self.write(view)
        return super().forward(x)

    def write(self, view: Tensor) -> None:
        view.detach().mul_(0.5)


class HalvingRows(Halving):
    def write(self, view: Tensor) -> None:
        rows = view.data
        rows[0] = 0.5 * rows[0]


class Adding(Halving):
    def write(self, view: Tensor) -> None:
        torch.add(view.detach(), 1.0, out=view.detach())


class Skipping(nn.Module):
    """What the halved view belongs to is read again at the end."""

    def __init__(self, kind: type[Halving]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Viewed(), kind(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        x, view = self.blocks[1](self.blocks[0](x))
        return self.blocks[3](self.blocks[2](x.detach() + 0, view)) + x


WRITERS = [Halving, HalvingRows, Adding]


def skipping(kind: type[Halving]) -> nn.Module:
    torch.manual_seed(5)
    return Skipping(kind).double()


def train_skipping(kinds: Sequence[type[Halving]]) -> list[tuple[list[float], dict[str, Tensor], int]]:
    found = []
    for kind in kinds:
        stages = dist.get_world_size() if dist.is_initialized() else 2
        model, x = skipping(kind), ROUNDS[0][0]
        with penstock.Pipeline(model, (x,), squares, sgd, microbatches=2, stages=stages, check="off") as pipe:
            losses = [pipe.step(x, target).loss.item() for x, target in ROUNDS]
            found.append((losses, dict(pipe.full_state_dict(rank=None) or {}), pipe.plan.layers))
    return found


def assert_plain(outcomes: Sequence[tuple[list[float], dict[str, Tensor], int]]) -> None:
    for kind, (losses, state, layers) in zip(WRITERS, outcomes, strict=True):
        assert_equal(train_by_loop(skipping(kind), ROUNDS, squares, sgd, 2), Outcome(tuple(losses), state))
        assert layers == 3


def test_a_view_that_code_can_write_stays_with_its_tensor() -> None:
    assert_plain(train_skipping(WRITERS))


def test_a_view_that_code_can_write_stays_with_its_tensor_in_two_processes(pool: Pool) -> None:
    for outcomes in pool.run(2, train_skipping, WRITERS):
        assert_plain(outcomes)


class Checkpointed(Block):
    """Changes its own state in a forward that a checkpoint runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls, self.noted = 0, [0.0]
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]

    def inner(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Normalized(Checkpointed):
    def inner(self, x: Tensor) -> Tensor:
        return self.norm(super().inner(x).transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Counted(Checkpointed):
    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().inner(x) / (1 + 0.1 * self.calls)


class Noted(Checkpointed):
    def inner(self, x: Tensor) -> Tensor:
        self.noted.append(x.detach().mean().item())
        return super().inner(x) * (1 + self.noted[-2])


class Averaged(Checkpointed):
    def inner(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return super().inner(x) + self.mean


STATES = [(Normalized, "norm"), (Counted, "calls"), (Noted, "noted"), (Averaged, "mean")]


def checkpointed(kind: type[Block], listed: bool) -> nn.Module:
    model = build(Block)
    model.blocks[0] = kind().double()
    return nn.Sequential(model.first, *model.blocks, model.last) if listed else model


@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
@pytest.mark.parametrize(("kind", "name"), STATES)
def test_state_that_a_checkpoint_changes_again(kind: type[Block], name: str, listed: bool) -> None:
    x = ROUNDS[0][0]
    text = rf"the backward of (blocks\.0|1) changes {name}\S* as its forward does, and stage 0 runs forwards of 2"
    with pytest.raises(PlanError, match=text):
        penstock.Pipeline(checkpointed(kind, listed), (x[:2],), squares, sgd, microbatches=2, stages=2)


def test_one_microbatch_keeps_the_order() -> None:
    assert_trains(lambda: checkpointed(Noted, listed=True), microbatches=1, stages=2, predicts=False)


def test_a_checkpoint_without_state_trains() -> None:
    assert_trains(lambda: checkpointed(Checkpointed, listed=False), stages=2)


Hook = Callable[[nn.Linear], Any]


def clamp_gradient(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamp_sum(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.clamp_(-0.01, 0.01)


HOOKS: dict[str, Hook] = {
    "clamp_gradient": lambda linear: linear.weight.register_hook(clamp_gradient),
    "clamp_sum": lambda linear: linear.weight.register_post_accumulate_grad_hook(clamp_sum),
    "print": lambda linear: linear.bias.register_hook(print),
}


def tied(hook: Hook) -> Stack:
    model = build(Block)
    model.blocks[3].linear = model.blocks[0].linear
    hook(model.blocks[0].linear)  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_on_a_weight_of_several_stages(name: str) -> None:
    text = rf"the parameter blocks\.0\.linear\.\w+ is shared by stages 0, \d.* and has the hook '{name}'"
    with pytest.raises(PlanError, match=text):
        penstock.Pipeline(tied(HOOKS[name]), (ROUNDS[0][0],), squares, sgd, stages=2)


def test_a_hook_on_a_weight_of_one_stage_trains() -> None:
    def hooked() -> nn.Module:
        model = build(Block)
        model.blocks[0].linear.weight.register_hook(clamp_gradient)  # type: ignore[union-attr]
        return model

    assert_trains(hooked, stages=2)
