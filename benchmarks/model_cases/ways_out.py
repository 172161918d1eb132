"""The models by hand that are refused, once more with the way out that the error names.

A case is called after the refused one: ``name: what was done``. Most compute what the refused model computes.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model_cases import habit_models
from model_cases.cases import Case
from model_cases.habit_blocks import WIDTH, BatchNormed, Block, Reversal, Stack, draw
from model_cases.habit_models import Coder, PadAndPack, ParameterListModel, StackedWeights
from model_cases.pages import WAYS_OUT

__all__ = ["CASES"]

# What the model did around its blocks, done by its first or its last layer


class Around(nn.Module):
    """A layer, and what is done before or after it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Booked(Around):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.register_buffer("book", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        y = x + self.book
        with torch.no_grad():
            self.book.copy_(0.9 * self.book + 0.1 * x.mean((0, 1)))
        return y


class Reassigning(Booked):
    def forward(self, x: Tensor) -> Tensor:
        self.book = 0.9 * self.book + 0.1 * x.detach().mean((0, 1))
        return self.layer(x + self.book)  # type: ignore[no-any-return]


class Straight(Stack):
    """The blocks without a connection over them."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Counting(Around):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.steps, self.plain = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.layer(x) * min(1.0, self.steps / 4)  # type: ignore[no-any-return]


class PlainTensor(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.plain += 1
        return self.layer(x) * float(self.plain)  # type: ignore[no-any-return]


class Multiplying(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self.layer(x) * self.steps  # type: ignore[no-any-return]


class Remembering(Around):
    """Returns what it remembers, too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.memory.append(x.detach().mean())
        return self.layer(x), torch.stack(self.memory).sum()


class WithMemory(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.first = Remembering(self.first)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        early, total = self.first(x)
        x = early
        for block in self.blocks:
            x = block(x)
        return self.last(x + early) + total  # type: ignore[no-any-return]


class Drawing(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * random.random()  # type: ignore[no-any-return]


class DrawingTensors(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * torch.rand([])  # type: ignore[no-any-return]


class Batch(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / (1 if x.shape[0] < 3 else x.shape[0])  # type: ignore[no-any-return]


class Values(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * 2 if y.mean() > 0 else y


class ChoosingValues(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.where(y.mean() > 0, y * 2, y)


class WithoutItem(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.abs().max().clamp(min=1.0)


class Loss(Around):
    latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.latest = y.detach().square().mean()
        return y


class Scaling(Around):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.1)
        return y


class Reversing(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(Reversal.apply(x))  # type: ignore[no-any-return, no-untyped-call]


class WithDomain(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.domain = Reversing(nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x), self.domain(x)


def around(
    first: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    block: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    last: Callable[[nn.Module], nn.Module] = lambda layer: layer,
    kind: Callable[[], Stack] = lambda: Stack(Block),
) -> Callable[[], nn.Module]:
    """Builds a stack in whose layers something else is done."""

    def build() -> nn.Module:
        model = kind()
        model.first, model.last = first(model.first), last(model.last)  # type: ignore[assignment]
        model.blocks = nn.ModuleList(map(block, model.blocks))
        return model

    return build


# What the model did with its blocks, done by each block


class Dropped(Around):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + self.layer(x)  # type: ignore[no-any-return]


class DroppedByTorch(Around):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return x + self.layer(x)  # type: ignore[no-any-return]


class Exiting(Around):
    """Does nothing once a block before it is done."""

    def forward(self, x: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        if done:
            return x, done
        x = self.layer(x)
        return x, x.abs().mean() < 0.1


class WithExits(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: Exiting(Block()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        done = torch.zeros((), dtype=torch.bool)
        for block in self.blocks:
            x, done = block(x, done)
        return self.last(x)


class Observed(Block):
    """Its hook writes in an attribute of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.register_forward_hook(lambda module, inputs, output: module.seen.append(output.detach().mean()))


class Leaving(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y.square().mean()


class Returned(Stack):
    def __init__(self) -> None:
        super().__init__(Leaving)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        early = x = self.first(x)
        losses = []
        for block in self.blocks:
            x, loss = block(x)
            losses.append(loss)
        return self.last(x + early), torch.stack(losses).sum()


class Autocast(Around):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)  # type: ignore[no-any-return]


class ToFloat(Autocast):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class Vmapped(Around):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.layer)(x)  # type: ignore[no-any-return]


class Functional(Around):
    def forward(self, x: Tensor) -> Tensor:
        weights = {name: parameter * 0.9 for name, parameter in self.layer.named_parameters()}
        return torch.func.functional_call(self.layer, weights, (x,))  # type: ignore[no-any-return]


class Still(Around):
    def forward(self, x: Tensor) -> Tensor:
        self.layer.eval()
        return self.layer(x)  # type: ignore[no-any-return]


def still() -> nn.Module:
    model = Stack(BatchNormed)
    model.blocks[0] = Still(model.blocks[0])
    return model


class Packed(Around):
    """Packs and unpacks what it takes."""

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0]) % 3 + x.shape[1] - 2
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = self.layer(packed)
        return nn.utils.rnn.pad_packed_sequence(found, batch_first=True, total_length=x.shape[1])[0]


class NestedTensors(Around):
    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(x.unbind(0)), layout=torch.jagged)
        return self.layer(nested).to_padded_tensor(0.0)  # type: ignore[no-any-return]


class NotReentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)


class CopyingTwin(Block):
    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.linear.parameters(), self.target.parameters(), strict=True):
                its.mul_(0.9).add_(mine, alpha=0.1)
        return super().forward(x) + nn.functional.linear(x, self.target.weight.clone(), self.target.bias.clone())


# Blocks that were none


class Weighted(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) + x


class Tanh(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


def weighted(weights: Iterable[Tensor]) -> nn.Module:
    return nn.Sequential(*map(Weighted, weights))


def coders() -> nn.Module:
    blocks = [Coder() for _ in range(3)]
    return nn.Sequential(*(Tanh(each.there) for each in blocks), *(Tanh(each.back) for each in blocks))


def packed() -> nn.Module:
    return nn.Sequential(*map(Packed, PadAndPack().layers))


# What the user changed between steps


def write_data(model: nn.Module, step: int) -> None:
    if step == 1:
        with torch.no_grad():
            model.blocks[1].linear.weight.mul_(0.5)  # type: ignore[index,union-attr,operator]


def write_block(model: nn.Module, step: int) -> None:
    if step == 1:
        torch.manual_seed(3)
        model.blocks[1].load_state_dict(Block().double().state_dict())  # type: ignore[index,union-attr,operator]


class Tempered(Around):
    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.temperature  # type: ignore[no-any-return]


def heat(model: nn.Module, step: int) -> None:
    model.last.temperature = 1.0 + step  # type: ignore[union-attr,assignment]


class Masked(Block):
    """Has its hook from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.share = 1.0
        self.linear.weight.register_hook(lambda gradient: gradient * self.share)


def mask(model: nn.Module, step: int) -> None:
    if step == 1:
        model.blocks[1].share = 0.1  # type: ignore[index,union-attr]


def halve(model: nn.Module, step: int) -> None:
    if step == 1:
        model.last.register_forward_hook(lambda _, __, output: output * 0.5)  # type: ignore[union-attr,operator]


def still_blocks(model: nn.Module, step: int) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.train(step != 1)


def in_blocks(change: Callable[[nn.Module, int], None]) -> Callable[[nn.Module, int], None]:
    return lambda model, step: change(habit_models.Blocks(model), step)


def sequence() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block())


IN_A_BLOCK: dict[str, Callable[[], nn.Module]] = {
    "BookOutside": around(first=Booked, kind=Straight),
    "ReassignedOutside": around(first=Reassigning),
    "CounterOutside": around(last=Counting),
    "PlainTensorOutside": around(last=PlainTensor),
    "ListOutside": WithMemory,
    "GlobalOutside": around(last=Multiplying),
    "BatchOutside": around(last=Batch),
    "ValuesOutside": around(last=Values),
    "EarlyExit": WithExits,
    "ReversalOutside": WithDomain,
    "ScaledGradientOutside": around(first=Scaling, kind=Straight),
    "LossInside": around(last=Loss),
    "AutocastOutside": around(Autocast, Autocast, ToFloat),
    "VmappedOutside": around(Vmapped, Vmapped, Vmapped),
    "FunctionalOutside": around(block=Functional, kind=Straight),
    "SwitchedMode": still,
    "PadAndPack": packed,
    "Jagged": around(NestedTensors, NestedTensors, NestedTensors),
}
OTHER: dict[str, Callable[[], nn.Module]] = {
    "ValuesOutside: torch.where": ChoosingValues,
    "ItemOutside: operators on tensors": WithoutItem,
    "ObservedBlocks: in the block's own list": lambda: Stack(Observed),
    "AuxiliaryAttribute: returned": Returned,
    "Reentrant: use_reentrant=False": lambda: Stack(NotReentrant),
    "CheckpointedBlocks, reentrant: use_reentrant=False": lambda: habit_models.CheckpointedBlocks(False),
    "MomentumTwin: reads a copy": lambda: Stack(CopyingTwin),
    "ParameterListModel: a module for each weight": lambda: weighted(ParameterListModel().weights),
    "StackedWeights: a module for each weight": lambda: weighted(StackedWeights().weights),
    "OtherMethod: a module for each method": coders,
}
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "RandomOutside: in a block": around(last=Drawing),
    "RandomOutside: torch.rand": around(last=DrawingTensors),
    "LayerDrop: in a block": around(block=Dropped, kind=Straight),
    "TorchLayerDrop: in a block": around(block=DroppedByTorch, kind=Straight),
}
CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], None]]] = {
    "p.data = ...: written in place": (lambda: Stack(Block), write_data),
    "a new nn.Parameter: written in place": (lambda: Stack(Block), write_data),
    "a new block: written in place": (lambda: Stack(Block), write_block),
    "model.temperature: in a block": (around(last=Tempered), heat),
    "register_hook: before the pipeline": (lambda: Stack(Masked), mask),
    "a hook on the model: on a block": (lambda: Stack(Block), halve),
    "model.eval(): of its blocks": (lambda: Stack(BatchNormed), still_blocks),
    "nn.Sequential, p.data = ...: written in place": (sequence, in_blocks(write_data)),
}
FROZEN: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int], None]]] = {
    "requires_grad_(False): a new pipeline": (lambda: Stack(Block), habit_models.freeze),
    "requires_grad_(True): a new pipeline": (lambda: Stack(Block), habit_models.unfreeze),
    "nn.Sequential, requires_grad_(False): a new pipeline": (sequence, in_blocks(habit_models.freeze)),
}


def hooked() -> nn.Module:
    """The observing hook of `HookedOutside` on its last layer."""
    model = Stack(Block)
    model.last.seen = []  # type: ignore[assignment]
    model.last.register_forward_hook(lambda module, inputs, output: module.seen.append(1))
    return model


def case(name: str, build: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(name, WAYS_OUT, build, draw, **options)


CASES: tuple[Case, ...] = (
    *(case(f"{name}: in a block", build) for name, build in IN_A_BLOCK.items()),
    case("HookedOutside: on a block", hooked),
    *(case(name, build) for name, build in OTHER.items()),
    Case(
        "nn.TransformerEncoder, causal mask: is_causal=True",
        WAYS_OUT,
        lambda: habit_models.CausalEncoder(True),
        habit_models.vectors,
    ),
    *(case(name, build, microbatches=1, draws=True) for name, build in DRAWING.items()),
    *(case(name, build, between=between) for name, (build, between) in CHANGES.items()),
    *(case(name, build, between=between, rebuilds=True) for name, (build, between) in FROZEN.items()),
)
