"""What a rehearsal sees beside plain steps: a loop's own changes, evaluations, small differences, and their causes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PenstockError, PlanError, RehearsalError
from support.found_inputs import Block, Chain, rows
from support.models import sgd


def rehearsed(model: Any, *, steps: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    x, t = rows(8, 8), rows(8, 8)
    given = {"sample": (x[:2],), "loss_fn": F.mse_loss, "optimizer": sgd, "microbatches": 4}
    return penstock.rehearse(model, [(x, t), (t, x), (x, t)], steps=steps, **{**given, **changes})


class ByHistory(Block):
    """Adds a little where the input comes from no operator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + 1e-6 * (x.grad_fn is None))


class ByLeaf(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (0.5 if x.is_leaf else 1.0)


class Counting(Block):
    """Counts its calls within a checkpoint, which runs again in the backward."""

    count = 0

    def inner(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * (1 + 1 / self.count)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


class Writing(Block):
    """The third block writes to its input, if the data say so: the second one has saved that for its backward."""

    number = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.number == 1:
            return torch.tanh(self.a(x))
        y = super().forward(x.clone())
        if self.number == 2 and float(x.detach().abs().max()) > 0.3:
            x.data.mul_(0.5)
        return y


class Centred(Block):
    """Knows the mean of its batch in evaluations only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else x - x.mean(0))


class Active(Chain):
    """Leaves out blocks that are not active."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.active = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if block.active:
                x = block(x)
        return x


def hooked() -> nn.Module:
    model: Any = Chain()
    model.blocks[3].a.weight = model.blocks[0].a.weight
    model.blocks[0].a.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model


@pytest.mark.parametrize(
    ("make", "kind", "cause"),
    [
        (lambda: Chain(ByLeaf), RehearsalError, "beside its values"),
        (lambda: Chain(Counting), PlanError, "torch.utils.checkpoint runs a forward again"),
        (hooked, PlanError, "is shared by stages 0, 1 and has the hook"),
    ],
)
def test_causes_are_named(make: Any, kind: type[Exception], cause: str) -> None:
    with pytest.raises(kind, match=cause):
        rehearsed(make, accumulation=True)


@pytest.mark.parametrize("made", [torch.float32, torch.float64])
def test_a_model_is_judged_in_the_type_that_trains(made: torch.dtype) -> None:
    with pytest.raises(RehearsalError, match="beside its values") as raised:
        rehearsed(lambda: Chain(ByHistory).to(made))
    assert "training in float64" in str(raised.value)


def test_evaluations_are_compared() -> None:
    with pytest.raises(RehearsalError, match="First the evaluation loss after step 1 is") as raised:
        rehearsed(Chain(Centred))
    assert "likely cause: the mode: the training is the same" in str(raised.value)


class OnlyTrains(Chain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else torch.zeros(3)


def test_models_that_cannot_be_evaluated_are_judged_without() -> None:
    assert "not judged: an evaluation, in which your loop fails" in str(rehearsed(OnlyTrains()))


def test_what_a_loop_does_between_steps_is_done_in_all_trainings() -> None:
    calls: list[int] = []

    def between(model: Any, step: int) -> None:
        calls.append(step)
        with torch.no_grad():
            model.blocks[step].a.weight.mul_(0.5)

    found = rehearsed(Chain(), steps=3, between=between)

    assert found.difference is None
    assert calls == [1, 2] * (len(calls) // 2)
    # The loop, once more from shaken weights, again, and the pipeline.
    assert len(calls) == 2 * 4


def test_a_function_may_return_what_its_loop_does() -> None:
    def make() -> dict[str, Any]:
        kept: list[Tensor] = []

        def between(model: Any, step: int) -> None:
            kept.append(model.blocks[0].a.weight.detach().sum())
            model.blocks[1].a.bias.data.add_(kept[-1])

        x = rows(8, 8)
        given = {"sample": (x[:2],), "loss_fn": F.mse_loss, "optimizer": sgd, "microbatches": 4}
        return {"model": Chain(), "batches": [(x, x)] * 2, "between": between, **given}

    assert penstock.rehearse(make).difference is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model, step: model.blocks[1].requires_grad_(False), "requires_grad is False"),
        (lambda model, step: model.blocks.__setitem__(1, Block()), "blocks.1"),
    ],
)
def test_a_change_that_a_pipeline_refuses_is_reported(change: Any, text: str) -> None:
    with pytest.raises(PenstockError, match=text) as raised:
        rehearsed(Chain(), between=change)
    assert not isinstance(raised.value, RehearsalError)


def test_a_change_that_is_not_followed_is_found() -> None:
    def between(model: Any, step: int) -> None:
        model.blocks[1].active = False

    try:
        assert rehearsed(Active(), between=between).difference is None
    except RehearsalError as error:
        assert "step 1" in str(error)
    except PenstockError as error:
        assert "active" in str(error)


@pytest.mark.parametrize("between", [3, lambda model: None, "step"])
def test_wrong_functions(between: Any) -> None:
    with pytest.raises(PenstockError, match=r"rehearse\(between=\): expected a function that takes \(model, step\)"):
        rehearsed(Chain(), between=between)


def rehearse_in_processes() -> list[str]:
    """What rehearsals say of views that a block writes, and of a loss that fails in one process."""
    found = []
    model = Chain(Writing)
    for number, block in enumerate(model.blocks):
        block.number = number  # type: ignore[assignment]

    def failing(output: Tensor, target: Tensor) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("no target")
        return F.mse_loss(output, target)

    cases: list[dict[str, Any]] = [{"model": model, "accumulation": True}, {"model": Chain(), "loss_fn": failing}]
    for given in cases:
        try:
            found.append(str(rehearsed(**given)))
        except PenstockError as error:
            found.append(str(error))
    return found


def test_two_processes(pool: Any) -> None:
    (view, other), (same, failed) = pool.run(2, rehearse_in_processes)

    assert "a tensor that a block writes in place, perhaps by a view" in view
    assert same == view
    assert "your loop fails with ValueError: no target" in failed
    assert "no target" in other
    assert "rank 1" in other
