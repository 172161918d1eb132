"""What the code between blocks does that a trace cannot keep, and what blocks hand on beside tensors."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block, Stack, assert_trains, batches

SAMPLE = (batches((6,))[0][0],)


class HidingNames(Stack):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, each) for name, each in super().named_parameters(*args, **kwargs) if "blocks.0" not in name)


class HidingModules(Stack):
    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((name, each) for name, each in super().named_modules(*args, **kwargs) if "blocks.0" not in name)


class Renaming(Stack):
    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name.replace("blocks.0", "block"), each) for name, each in super().named_parameters(prefix, recurse))


class HidingBuffers(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm1d(6))

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return iter(())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (HidingNames, r"blocks\.0\.linear\.weight"),
        (HidingModules, r"blocks\.0\.linear\.weight"),
        (Renaming, "first.weight"),
        (HidingBuffers, r"blocks\.0\.running_mean"),
    ],
)
def test_methods_that_do_not_list_all_weights_are_refused(kind: type[Stack], name: str) -> None:
    with pytest.raises(CaptureError, match=rf"{kind.__name__} of which named_parameters.* does not list {name}: leave"):
        capture(kind(), SAMPLE)


class ListingOnce(Block):
    """A block whose methods list less than it trains, which is seen by it alone."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(())


def test_what_the_methods_of_a_block_list_changes_nothing() -> None:
    assert_trains(lambda: Stack(ListingOnce), stages=2, predicts=False)


class Sizing(Block):
    """Hands its sizes on to the next block, which goes by them."""

    def __init__(self, size: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.size = size

    def forward(self, given: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        x, size = given
        size = size["size"] if isinstance(size, dict) else size
        y = super().forward(x.reshape(size) if size is not None else x)
        return y, self.size(y)


class HandingOn(Stack):
    def __init__(self, size: Callable[[Tensor], Any]) -> None:
        super().__init__(lambda: Sizing(size))

    def run(self, x: Tensor) -> Tensor:
        size = None
        for block in self.blocks:
            x, size = block((x, size))
        return x


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "size",
    [
        lambda y: y.shape,
        lambda y: {"size": y.size(), "first": y.shape[:1]},
        lambda y: torch.Size((*y.shape[:-1], WIDTH)),
        lambda y: y.unsqueeze(0).shape[1:],
    ],
    ids=["shape", "nested", "made", "part"],
)
def test_blocks_hand_sizes_on(size: Callable[[Tensor], Any]) -> None:
    assert_trains(lambda: HandingOn(size), stages=2)


class DrawingLast(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.rand(3, generator=torch.Generator().manual_seed(7), dtype=x.dtype)


class DrawingOften(Stack):
    def run(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        for block in self.blocks:
            x = block(x) + torch.rand(WIDTH, generator=generator, dtype=x.dtype)
        return x


class DrawingForSizes(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=x.dtype)


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (DrawingLast, "torch.Generator"),
        (DrawingOften, "torch.Generator"),
        (DrawingForSizes, r"a generator= of its own"),
    ],
)
def test_a_generator_that_code_between_blocks_makes_is_named(kind: type[Stack], cause: str) -> None:
    with pytest.raises(CaptureError, match=cause) as caught:
        capture(kind().double(), SAMPLE)

    assert "lifted" not in str(caught.value)


class Branches(Stack):
    """Runs two blocks in threads, of a pool or with what each finds in a dictionary."""

    def run(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            one, other = pool.map(lambda block: block(x), self.blocks[:2])
        return self.blocks[3](self.blocks[2](one + other))  # type: ignore[no-any-return]


class LateBranches(Stack):
    def run(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        with ThreadPoolExecutor(2) as pool:
            return sum(each.result() for each in [pool.submit(block, x) for block in self.blocks[2:]])  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Branches, LateBranches])
def test_threads_are_named_as_the_cause(kind: type[Stack]) -> None:
    with pytest.raises(
        CaptureError, match=rf"{kind.__name__} calls modules in threads of its own.*one after the other"
    ):
        capture(kind().double(), SAMPLE)
