"""Code before a block that cannot be traced runs as the Python that it is; what follows has what the sample led to."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capturing import capture
from penstock.errors import CaptureError, PenstockError
from support.blocks import WIDTH, Block, Stack, assert_trains, batches, sgd, squares


class Listing(Stack):
    """Goes through the samples one by one, and trains a weight of its own there."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = list(self.blocks[0](x))
        x = torch.stack([row * self.scale for row in rows])
        for block in self.blocks[1:]:
            x = block(x)
        return x


class Searching(Stack):
    """Finds out by values where something is, as models search for images in a text."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        for sample in range(len(x)):
            for place in (x[sample].sum(-1) > 0).nonzero().flatten().tolist():
                x[sample, place] = x[sample, place] * 2
        return super().forward(x)


class Drawing(Stack):
    """Makes a generator in every forward."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH, generator=torch.Generator().manual_seed(7), dtype=x.dtype)
        return super().forward(x + noise)


class MaskedBlock(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x if mask is None else x * mask)


class Masking(Stack):
    """Leaves a mask out where it hides nothing, and multiplies with a tensor that it has passed to the blocks."""

    def __init__(self) -> None:
        super().__init__(MaskedBlock)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.stack([row > -1 for row in x]).to(x.dtype)
        mask = None if seen.all() else seen
        for block in self.blocks:
            x = block(x, mask)
        return x


@pytest.mark.parametrize("kind", [Listing, lambda: Searching(Block), lambda: Drawing(Block), Masking])
def test_code_before_blocks_that_cannot_be_traced_has_the_numbers_of_the_plain_loop(
    kind: Callable[[], nn.Module],
) -> None:
    assert capture(kind().double(), (batches((6,))[0][0],)).layers[0].name == "opening"
    assert_trains(kind, stages=2)


class Deciding(Stack):
    """Decides by values in a way that the code behind the first block goes by."""

    def __init__(self, way: str) -> None:
        super().__init__(Block)
        self.way, self.seen = way, 0

    def forward(self, x: Tensor) -> Tensor:
        # Nothing reads `place` later.
        for place in x.mean(-1).flatten().tolist():  # noqa: B007
            pass
        match self.way:
            case "variable":
                sign = -1 if x.mean() > 0.5 else 1
                return super().forward(x) * sign
            case "object":
                state = SimpleNamespace(sign=-1 if x.mean() > 0.5 else 1)
                return super().forward(x) * state.sign
            case "list":
                names = ["right"] if x.mean() > 0.5 else []
                return super().forward(x) * len(names)
            case "attribute":
                self.seen = int(x.mean() > 0.5)
                return super().forward(x) * (1 + self.seen)
        return -super().forward(x) if x.mean() > 0.5 else super().forward(x)


@pytest.mark.parametrize(
    ("way", "named"),
    [
        ("variable", r"sign in Deciding\.forward was 1 and is -1"),
        ("object", r"state in Deciding\.forward\.sign was 1 and is -1"),
        ("list", r"the length of names in Deciding\.forward was 0 and is 1"),
        ("attribute", r"self in Stack\.forward\.seen was 0 and is 1"),
        ("line", r"the line of Deciding\.forward was .*test_openings.py"),
    ],
)
def test_a_batch_that_leads_elsewhere_than_the_sample_is_refused(way: str, named: str) -> None:
    torch.manual_seed(0)
    (x, target) = batches((6,))[0]
    x = x - x.mean()
    options: dict[str, Any] = {"loss_fn": squares, "optimizer": sgd, "stages": 2, "microbatches": 2}
    pipe = penstock.Pipeline(Deciding(way).double(), sample=(x[:2],), check="off", **options)
    pipe.step(x, target)

    with pytest.raises(PenstockError, match=named):
        pipe.step(x + 2, target)


class Reading(Listing):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack(list(x))
        total = rows.sum(0)
        for block in self.blocks:
            x = block(x) + total
        return x


class Counting(Listing):
    """Its code behind the blocks divides by a length that the code before has found."""

    def forward(self, x: Tensor) -> Tensor:
        length = torch.stack(list(x)).shape[1]
        return Stack.forward(self, x) / length


def test_a_tensor_that_only_the_code_before_knows_is_refused_with_the_first_cause() -> None:
    with pytest.raises(CaptureError, match=r"list\(x\)(.|\n)*fixes the batch size(.|\n)*reads a tensor of shape \(6"):
        capture(Reading().double(), (batches((6,))[0][0],))


def test_a_length_that_the_code_behind_has_from_the_code_before_is_fixed() -> None:
    # One of 5, too, and not only of 6, which is the width.
    for length in (5, 6):
        model, x = Counting().double(), batches((length,))[0][0]
        chain = capture(model, (x,))

        assert chain.inputs.sizes["args[0]"][1] == (length, length)
    with pytest.raises(CaptureError, match="the capture holds for"):
        chain.inputs.bind((x[:, :4],), {})
