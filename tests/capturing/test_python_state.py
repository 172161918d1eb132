"""State that blocks keep in Python: capture runs copies and uses none of it up, and a cut goes through none of it."""

import itertools
import random
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capturing import capture
from penstock.errors import CaptureError, PlanError
from support.blocks import Block, Stack, assert_trains, batches, build, sgd, squares

Count = Callable[[], float]


class Scaled(Block):
    """Scales its result by what `count` returns, which changes from call to call."""

    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * self.count())


def in_default() -> Count:
    def count(box: SimpleNamespace = SimpleNamespace(calls=0)) -> int:  # noqa: B008
        box.calls += 1
        return int(box.calls)

    return count


def in_closure() -> Count:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


def in_function() -> Count:
    def count() -> int:
        count.calls += 1  # type: ignore[attr-defined]
        return int(count.calls)  # type: ignore[attr-defined]

    count.calls = 0  # type: ignore[attr-defined]
    return count


class InSlot:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


class InArray:
    def __init__(self) -> None:
        self.calls = array("l", [0])

    def __call__(self) -> int:
        self.calls[0] += 1
        return self.calls[0]


def generated() -> Iterator[int]:
    yield from range(1000)


HOLDERS: dict[str, Callable[[], Count]] = {
    "default argument": in_default,
    "closure": in_closure,
    "attribute of a function": in_function,
    "slot": InSlot,
    "array": InArray,
    "itertools": lambda: itertools.count(1).__next__,
    "iterator": lambda: iter(range(1000)).__next__,
    "NumPy": lambda: numpy.random.default_rng(3).random,
    "random": lambda: random.Random(3).random,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
@pytest.mark.parametrize("name", HOLDERS)
def test_a_pipeline_has_the_numbers_of_a_plain_loop(name: str, listed: bool) -> None:
    assert_trains(lambda: as_given(build(lambda: Scaled(HOLDERS[name]())), listed), stages=2)


def as_given(model: Stack, listed: bool) -> nn.Module:
    return nn.Sequential(model.first, *model.blocks, model.last) if listed else model


@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
def test_a_hook_sees_no_run_of_a_capture(listed: bool) -> None:
    seen: list[float] = []

    def scale(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen.append(1.0)
        return output * len(seen)

    def made() -> nn.Module:
        seen.clear()
        model = build(Block)
        model.blocks[1].register_forward_hook(scale)
        return as_given(model, listed)

    assert_trains(made, stages=2)


@pytest.mark.parametrize("listed", [False, True], ids=["traced", "listed"])
def test_a_generator_is_refused(listed: bool) -> None:
    model = as_given(build(lambda: Scaled(generated().__next__)), listed)
    with pytest.raises(CaptureError, match=r"Scaled\.count: .* found a generator .* itertools\.count"):
        capture(model, (batches((6,))[0][0],))


class Locked(Block):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.nothing = __import__("threading").Lock(), object()
        self.found = self.nothing

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x) if self.found is self.nothing else x


def test_what_cannot_be_copied_is_shared() -> None:
    assert_trains(partial(Stack, Locked))


class Ticking(Block):
    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.calls += 1
        return super().forward(x)


class Slowed(Ticking):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) / self.clock.calls


class Gating(Ticking):
    def forward(self, x: Tensor) -> Tensor:
        self.clock["gate"] = torch.sigmoid(x.mean(-1, keepdim=True))
        return Block.forward(self, x)


class Gated(Ticking):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) * self.clock["gate"]


class Popping(Ticking):
    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) * self.clock.pop("gate")


class Drawing(Ticking):
    """Draws from a generator of NumPy that another block has, too."""

    def forward(self, x: Tensor) -> Tensor:
        return Block.forward(self, x) * float(self.clock.random())


PAIRS: dict[str, Callable[[], list[Block]]] = {
    "object": lambda: pair(SimpleNamespace(calls=0), Ticking, Slowed),
    "slot": lambda: pair(InSlot(), Ticking, Slowed),
    "tensor in a dict": lambda: pair({}, Gating, Gated),
    "tensor that is taken out": lambda: pair({}, Gating, Popping),
    "generator": lambda: pair(numpy.random.default_rng(3), Drawing, Drawing),
}


def pair(shared: Any, one: type[Ticking], other: type[Ticking]) -> list[Block]:
    return [Block(), one(shared), other(shared), Block()]


def paired(name: str, listed: bool) -> nn.Module:
    model = build(Block)
    model.blocks = nn.ModuleList(PAIRS[name]()).double()
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return as_given(model, listed)


@pytest.mark.parametrize("name", PAIRS)
def test_layers_that_share_an_object_which_changes_become_one(name: str) -> None:
    assert_trains(partial(paired, name, listed=True), microbatches=4)
    chain = capture(paired(name, listed=True), (batches((6,))[0][0],))
    assert [layer.name for layer in chain.layers] == ["0", "1", "2", "4", "5"]


@pytest.mark.parametrize("name", ["object", "slot", "generator"])
def test_blocks_that_share_an_object_which_changes_become_one_layer(name: str) -> None:
    assert_trains(partial(paired, name, listed=False), microbatches=4)


def test_blocks_that_all_share_an_object_cannot_be_cut() -> None:
    clock = SimpleNamespace(calls=0)
    model = nn.Sequential(*(Ticking(clock) for _ in range(3))).double()
    with pytest.raises(PlanError, match=r"Shared are clock \('self\.clock\.calls' in Ticking\.forward\)"):
        penstock.Pipeline(model, (batches((6,))[0][0],), squares, sgd, stages=2)


@pytest.mark.filterwarnings("ignore:The tensor attribute .* was assigned during export:UserWarning")
def test_blocks_that_hand_on_tensors_in_a_dict_are_refused() -> None:
    for name, text in (
        ("tensor in a dict", r"its forward changes blocks\.1\.clock\.gate"),
        ("tensor that is taken out", r"layer blocks\.2 fails on the sample with its arguments alone: KeyError: 'gate'"),
    ):
        with pytest.raises(CaptureError, match=text):
            capture(paired(name, listed=False), (batches((6,))[0][0],))


class Tabled(Ticking):
    """Fills a table that all blocks share, once."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if length not in self.clock:
            self.clock[length] = torch.arange(length, dtype=x.dtype)[:, None]
        return Block.forward(self, x) + self.clock[length]


def test_blocks_that_fill_a_table_are_one_layer() -> None:
    def made() -> nn.Module:
        table: dict[int, Tensor] = {}
        return as_given(build(lambda: Tabled(table)), listed=True)

    assert_trains(made)
    assert [layer.name for layer in capture(made(), (batches((6,))[0][0],)).layers] == ["0", "1", "5"]


class Rolling(Block):
    """Returns a number that depends on the data."""

    def forward(self, x: Tensor, steps: int = 0) -> tuple[Tensor, int]:  # type: ignore[override]
        y = super().forward(x).roll(steps, 1)
        return y, int(y.sum().item() * 100) % 8


class Sized(Block):
    """Returns a number that follows from a size."""

    def forward(self, x: Tensor, steps: int = 0) -> tuple[Tensor, int]:  # type: ignore[override]
        return super().forward(x).roll(steps, 1), 2 * x.shape[1]


class Passing(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x, steps = self.first(x), 0
        for block in self.blocks:
            x, steps = block(x, steps)
        return self.last(x)


def test_a_whole_number_that_a_block_returns_must_be_what_the_trace_has() -> None:
    def passing(kind: Callable[[], nn.Module]) -> Stack:
        torch.manual_seed(5)
        return Passing(kind).double()

    assert_trains(partial(Passing, Sized), sizes=[(2, 6), (4, 6), (4, 6)])
    x = batches((6,))[0][0][:2]
    with penstock.Pipeline(passing(Sized), (x,), squares, sgd, stages=2) as pipe:
        pipe.step(torch.cat([x, x], 1), None)
    with (
        penstock.Pipeline(passing(Rolling), (x,), squares, sgd, stages=2) as pipe,
        pytest.raises(penstock.PenstockError, match=r"leaf 1 of what layer blocks\.\d returns was \d when"),
    ):
        for scale in (1.0, 1.7, 2.9):
            pipe.step(scale * x, None)


class Freezing(Stack):
    """Freezes blocks for a call, and leaves them so if it `stays`."""

    stays = False

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[2:].requires_grad_(False)
        result = super().forward(x)
        if not self.stays:
            self.blocks[2:].requires_grad_(True)
        return result


class StaysFrozen(Freezing):
    stays = True


class TwinOfAll(Stack):
    """Moves a twin of its blocks, which begins as a copy, so that the first averages change nothing."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__(kind)
        self.twin = nn.ModuleList(kind() for _ in range(4)).requires_grad_(False)
        self.twin.load_state_dict(self.blocks.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, its in zip(self.blocks.parameters(), self.twin.parameters(), strict=True):
                self.move(its, own)
            y = x
            for block in self.twin:
                y = block(y)
        return super().forward(x) - y.mean()

    def move(self, twin: Tensor, own: Tensor) -> None:
        twin.lerp_(own, 0.1)


class TwinOfData(TwinOfAll):
    def move(self, twin: Tensor, own: Tensor) -> None:
        twin.data.mul_(0.5).add_(own.data, alpha=0.5)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Freezing, r"differs from the model in whether parameter blocks\.2\.\S+ has a gradient"),
        (StaysFrozen, r"differs from the model in whether parameter blocks\.2\.\S+ has a gradient"),
        (TwinOfAll, r"the forward of the model writes the parameter twin\.0\.linear\.\w+ outside of its blocks"),
        (TwinOfData, r"the forward of the model writes the parameter twin\.0\.linear\.\w+ outside of its blocks"),
    ],
)
def test_what_code_between_blocks_does_to_their_parameters_is_refused(kind: type[Stack], text: str) -> None:
    torch.manual_seed(5)
    model = kind(Block).double()
    before = [(each.requires_grad, each.detach().clone()) for each in model.parameters()]
    with pytest.raises(CaptureError, match=text):
        capture(model, (batches((6,))[0][0],))
    assert all(
        each.requires_grad == flag and torch.equal(each, numbers)
        for each, (flag, numbers) in zip(model.parameters(), before, strict=True)
    )


class Recycling(Stack):
    """Runs its blocks three times, the first two without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.zeros_like(x)
        for turn in range(3):
            with torch.set_grad_enabled(turn == 2):
                y = x + y
                for block in self.blocks:
                    y = block(y)
        return self.last(y)


def test_blocks_that_run_again_with_gradients_train() -> None:
    assert_trains(partial(Recycling, Block))


class Adding(Block):
    """Leaves an auxiliary loss in an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        return y


@pytest.mark.parametrize("target", [None, torch.zeros(4)])
def test_a_loss_that_reads_attributes_of_blocks_is_refused(target: Tensor | None) -> None:
    model = build(Adding)

    def loss(output: Tensor, target: Tensor | None) -> Tensor:
        return output.mean() + sum(block.auxiliary for block in model.blocks)  # type: ignore[misc]

    x = batches((6,))[0][0]
    with (
        penstock.Pipeline(model, (x[:1],), loss, sgd, stages=2, microbatches=4) as pipe,
        pytest.raises(penstock.PenstockError, match="which is not in the model"),
    ):
        pipe.step(x, target)
