"""Numbers that blocks keep outside of all modules: capture runs the blocks and leaves no trace there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capturing import capture
from penstock.errors import CaptureError
from support.blocks import WIDTH, Block

CALLS = 0
COUNTS: dict[str, int] = {}
STEPS: list[float] = []
MEANS: list[Tensor] = []
AVERAGE = torch.zeros(WIDTH, dtype=torch.float64)
DONE: set[str] = set()
MADE: dict[str, object] = {}


class InGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return super().forward(x) * CALLS


class InDict(Block):
    def forward(self, x: Tensor) -> Tensor:
        COUNTS["calls"] = COUNTS.get("calls", 0) + 1
        return super().forward(x) * COUNTS["calls"]


class InList(Block):
    def forward(self, x: Tensor) -> Tensor:
        STEPS.append(0.1 * len(STEPS))
        return super().forward(x) + sum(STEPS)


class InTensor(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            AVERAGE.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return super().forward(x) + AVERAGE.clone()


class InClass(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        InClass.calls += 1
        return super().forward(x) * self.calls


def in_closure() -> Callable[[], Block]:
    calls = 0

    class InClosure(Block):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x) * calls

    return InClosure


def in_hook() -> Callable[[], Block]:
    seen: list[float] = []

    def scale(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        seen.append(1.0)
        return output * len(seen)

    def build() -> Block:
        block = Block()
        block.register_forward_hook(scale)
        return block

    return build


def cleared(kind: Callable[[], Block]) -> Callable[[], Block]:
    """`kind`, with everything outside of modules as it is when a program starts."""
    global CALLS
    CALLS = InClass.calls = 0
    for holder in (COUNTS, STEPS, MEANS):
        holder.clear()  # type: ignore[attr-defined]
    AVERAGE.zero_()
    return kind


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return Stack(kind).double()


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(4, 5, WIDTH, dtype=torch.float64, generator=generator) for _ in range(3)]


def squares(output: Tensor, target: None) -> Tensor:
    return output.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


KINDS: dict[str, Callable[[], Callable[[], Block]]] = {
    "global": lambda: InGlobal,
    "dict": lambda: InDict,
    "list": lambda: InList,
    "tensor": lambda: InTensor,
    "class": lambda: InClass,
    "closure": in_closure,
    "hook": in_hook,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_pipeline_has_the_numbers_of_a_plain_loop(name: str) -> None:
    """One microbatch, so that the blocks run in the loop's order."""
    model = build(cleared(KINDS[name]()))
    optimizer, expected = sgd(model.parameters()), []
    for x in batches():
        loss = squares(model(x), None)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    model = build(cleared(KINDS[name]()))
    with penstock.Pipeline(model, (batches()[0],), squares, sgd, stages=2, schedule="1f1b-flush") as pipe:
        assert [pipe.step(x, None).loss.item() for x in batches()] == expected


class Passing(Block):
    """Passes tensors to other blocks in a global."""

    def forward(self, x: Tensor) -> Tensor:
        MEANS.append(x.detach().mean())
        return super().forward(x) + torch.stack(MEANS).sum()


def test_blocks_that_pass_tensors_in_a_global_are_refused() -> None:
    with pytest.raises(CaptureError, match="for state in Python or in global variables"):
        capture(build(cleared(Passing)), (batches()[0],))
    assert MEANS == []


class Once(Block):
    """Does something once in a process, and notes that it is done."""

    def forward(self, x: Tensor) -> Tensor:
        if "table" not in DONE:
            DONE.add("table")
            MADE["table"] = object()
        return super().forward(x)


def test_what_is_done_once_in_a_process_stays_done() -> None:
    capture(build(Once), (batches()[0],))
    made = MADE["table"]
    capture(build(Once), (batches()[0],))

    assert MADE["table"] is made
