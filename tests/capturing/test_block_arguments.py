"""Blocks that are given modules, sizes or decisions, and a beginning without gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from model_cases.cases import arguments
from model_cases.habit_models import OUTSIDE
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, Stack, assert_trains, batches


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

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if block.held else block(x, self.bias)
        return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b-flush", 3), ("zb-h1", 2), ("2bw", 2)])
def test_blocks_train_the_weights_of_a_module_that_they_are_given(holds: bool, schedule: str, stages: int) -> None:
    # Gradients of the shared module are added layer by layer.
    assert_trains(partial(Borrowing, holds), schedule, stages, within=1e-13)


class Sized(Block):
    """Takes a size that may change before its tensor."""

    def forward(self, length: int, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) / length


class PassingSizes(Stack):
    def __init__(self) -> None:
        super().__init__(Sized)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x.shape[1], x)
        return x


def test_a_block_may_take_sizes_before_tensors() -> None:
    assert_trains(PassingSizes)


def test_evaluation_is_checked_without_gradients() -> None:
    assert_trains(OUTSIDE["NoGradTrunk"], stages=2)


class Deciding(Block):
    def forward(self, x: Tensor, doubles: bool = False) -> Tensor:
        return super().forward(x) * (2 if doubles else 1)


class DecidingByValues(Stack):
    def __init__(self) -> None:
        super().__init__(Deciding)

    def decide(self, x: Tensor) -> bool | float:
        return (x > 5).any().item()

    def forward(self, x: Tensor) -> Tensor:
        doubles = self.decide(x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, doubles)
        return self.last(x)


class DecidingBySizes(DecidingByValues):
    def decide(self, x: Tensor) -> bool:
        return x.shape[1] > 5


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
    # Samples of four and more are large.
    inputs = arguments(lambda samples, length: torch.randn(samples, length, WIDTH) + 6 * (samples > 3))
    sizes = [(2, 6), (2, 6), (4, 5), (2, 6), (4, 8)]
    assert_trains(kind, schedule, stages, inputs=inputs, sizes=sizes, microbatches=1)


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

    def run(self, x: Tensor) -> Tensor:
        scale = Scale()
        for block in self.blocks:
            x = block(x, scale)
            self.change(scale, x)
        return x


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
    assert_trains(kind)


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
