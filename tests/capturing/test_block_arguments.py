"""Blocks that are given modules, sizes or decisions, and a beginning without gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import penstock
from model_cases.habit_models import OUTSIDE
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, Stack, batches, sgd, squares, train_plainly


class Biased(Block):
    """Adds what another module computes, which it is given or which it holds in a list."""

    def __init__(self, held: nn.Module | None = None) -> None:
        super().__init__()
        self.held = [held] if held is not None else []

    def forward(self, x: Tensor, bias: nn.Module | None = None) -> Tensor:
        other = self.held[0] if bias is None else bias
        return super().forward(x) + other(x)


class Borrowing(Stack):
    def __init__(self, holds: bool) -> None:
        bias = nn.Linear(WIDTH, WIDTH)
        super().__init__(lambda: Biased(bias if holds else None))
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.first(x)
        for block in self.blocks:
            x = block(x) if block.held else block(x, self.bias)
        return self.last(x + early)


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 3), ("zb-h1", 2), ("2bw", 2)])
def test_blocks_train_the_weights_of_a_module_that_they_are_given(holds: bool, schedule: str, stages: int) -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return Borrowing(holds).double()

    data = batches((6, 5, 6))
    model = made()
    optimizer, before = sgd(list(model.parameters())), [p.detach().clone() for p in model.parameters()]
    expected = []
    for x, target in data:
        newest = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before if schedule == "2bw" else newest, strict=True):
                parameter.copy_(value)
        losses = [squares(model(part), target) for part in x.chunk(2)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), newest, strict=True):
                parameter.copy_(value)
        before = newest
        optimizer.step()
        optimizer.zero_grad()
        expected.append((sum(losses) / 2).item())  # type: ignore[union-attr]
    staged = made()
    with penstock.Pipeline(
        staged, (data[0][0][:2],), squares, sgd, schedule=schedule, stages=stages, microbatches=2
    ) as pipe:
        # Gradients of the shared module are added layer by layer.
        assert [pipe.step(x, target).loss.item() for x, target in data] == pytest.approx(expected, rel=1e-13)
        pipe.drain()
    torch.testing.assert_close(staged.state_dict(), model.state_dict(), rtol=1e-12, atol=1e-14)


class Sized(Block):
    """Takes a size that may change before its tensor."""

    def forward(self, length: int, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) / length


class PassingSizes(Stack):
    def __init__(self) -> None:
        super().__init__(Sized)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x.shape[1], x)
        return self.last(x)


def test_a_block_may_take_sizes_before_tensors() -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return PassingSizes().double()

    data = batches((7, 6, 9))
    expected = train_plainly(made(), data)
    with penstock.Pipeline(made(), (data[0][0],), squares, sgd, stages=3) as pipe:
        assert [pipe.step(x, target).loss.item() for x, target in data] == expected


def test_evaluation_is_checked_without_gradients() -> None:
    data = batches((6,))
    torch.manual_seed(5)
    model = OUTSIDE["NoGradTrunk"]().double()
    with penstock.Pipeline(model, (data[0][0],), squares, sgd, stages=2) as pipe:
        found = pipe.predict(data[0][0])
    with torch.no_grad():
        assert torch.equal(model.eval()(data[0][0]), found)


class Deciding(Block):
    def forward(self, x: Tensor, doubles: bool = False) -> Tensor:
        return super().forward(x) * (2 if doubles else 1)


class DecidingByValues(Stack):
    def __init__(self) -> None:
        super().__init__(Deciding)

    def forward(self, x: Tensor) -> Tensor:
        doubles = (x > 5).any().item()
        x = self.first(x)
        for block in self.blocks:
            x = block(x, doubles)
        return self.last(x)


class DecidingBySizes(DecidingByValues):
    def forward(self, x: Tensor) -> Tensor:
        doubles = x.shape[1] > 5
        x = self.first(x)
        for block in self.blocks:
            x = block(x, doubles)
        return self.last(x)


class DecidingByResults(DecidingByValues):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, doubles=(x.mean() > 0).item())
        return self.last(x)


@pytest.mark.parametrize("kind", [DecidingByValues, DecidingByResults])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 2), ("zb-h1", 3)])
def test_a_decision_by_values_that_is_passed_to_blocks_is_made_for_every_batch(
    kind: Callable[[], Stack], schedule: str, stages: int
) -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return kind().double()

    data = [(x + 6 * (index % 2), target) for index, (x, target) in enumerate(batches((6, 5, 6, 8)))]
    plain = made()
    expected = train_plainly(plain, data)
    with penstock.Pipeline(made(), (data[0][0],), squares, sgd, schedule=schedule, stages=stages) as pipe:
        losses = [pipe.step(x, target).loss.item() for x, target in data]
        state = pipe.state_dict()["model"]

    assert losses == expected
    for name, tensor in plain.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_a_decision_by_sizes_that_is_passed_to_blocks_holds_for_sizes_that_decide_alike() -> None:
    x = batches((6,))[0][0]
    model = DecidingBySizes().double()
    chain = capture(model, (x,))
    found = chain.stage(0, len(chain.layers))((), chain.inputs.bind((x,), {}))
    assert torch.equal(found[0], model(x))
    with pytest.raises(CaptureError):
        chain.inputs.check_samples(4, chain.inputs.bind((x[:, :4],), {}))


class Scale:
    """As a cache of transformers with a sliding window: an object with a number in a tensor, made in every forward."""

    def __init__(self) -> None:
        self.number = torch.tensor(0.5)


class Scaled(Block):
    def forward(self, x: Tensor, scale: Scale) -> Tensor:
        return super().forward(x) * scale.number


class PassingNumbers(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def change(self, scale: Scale, x: Tensor) -> None:
        """What the code between blocks does with the number."""

    def forward(self, x: Tensor) -> Tensor:
        scale = Scale()
        x = self.first(x)
        for block in self.blocks:
            x = block(x, scale)
            self.change(scale, x)
        return self.last(x)


class AssigningNumbers(PassingNumbers):
    def change(self, scale: Scale, x: Tensor) -> None:
        scale.number = scale.number * 0.5 + 1


class WritingNumbers(PassingNumbers):
    """The backward does not read the number, so that it may be written."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = lambda x, scale, block=block: Block.forward(block, x) + scale.number

    def change(self, scale: Scale, x: Tensor) -> None:
        scale.number += 1


@pytest.mark.parametrize("kind", [PassingNumbers, AssigningNumbers, WritingNumbers])
def test_an_object_with_a_number_in_a_tensor_is_passed_to_blocks(kind: Callable[[], Stack]) -> None:
    def made() -> Stack:
        torch.manual_seed(5)
        return kind().double()

    data = batches((6, 5, 6))
    expected = train_plainly(made(), data)
    with penstock.Pipeline(made(), (data[0][0],), squares, sgd, schedule="1f1b-flush", stages=3) as pipe:
        assert [pipe.step(x, target).loss.item() for x, target in data] == expected


class PassingMeans(PassingNumbers):
    def change(self, scale: Scale, x: Tensor) -> None:
        scale.number = x.mean()


def test_an_object_with_a_tensor_that_was_computed_is_refused() -> None:
    with pytest.raises(
        CaptureError,
        match=r"(?s)blocks.1 is called with a Scale that cannot be copied .* Make it in each block, pass the tensors "
        r"in it \(for a cache of transformers: use_cache=False in sample=\), or pass the model as a list of layers",
    ):
        capture(PassingMeans().double(), (batches((6,))[0][0],))
