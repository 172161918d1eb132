"""Habits around the blocks: what the model itself does, how it holds them, what it returns, what users change."""

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from model_cases.cases import Case
from model_cases.habit_blocks import (
    WIDTH,
    Attention,
    BatchNormed,
    Block,
    Counter,
    Dropping,
    EmaBook,
    GradientMask,
    Parity,
    RandomDepth,
    Recurrent,
    Reversal,
    Routed,
    Stack,
    draw,
)

__all__ = ["CASES"]


def words(samples: int, length: int) -> tuple[Tensor]:
    return (torch.randint(0, 20, (samples, length)),)


# State, hooks and control flow outside of the blocks


class BookOutside(Stack):
    """A running mean of the first layer's output."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_buffer("book", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = x + self.book
        with torch.no_grad():
            self.book.copy_(0.9 * self.book + 0.1 * x.mean((0, 1)))
        for block in self.blocks:
            y = block(y)
        return self.last(y)


class ReassignedOutside(BookOutside):
    def forward(self, x: Tensor) -> Tensor:
        self.book = 0.9 * self.book + 0.1 * x.detach().mean((0, 1))
        return Stack.forward(self, x + self.book)


class CounterOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x) * min(1.0, self.steps / 4)


class TensorCounterOutside(Stack):
    """A buffer that counts, in place."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x) * (1 + self.steps)


class PlainTensorOutside(Stack):
    """A tensor that is not registered and that is written in place."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.plain = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.plain += 1
        return super().forward(x) * float(self.plain)


class ListOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)
        self.memory: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.memory.append(x.detach().mean())
        return super().forward(x) + sum(self.memory)


GLOBAL = {"calls": 0}


class GlobalOutside(Stack):
    """A counter in a global of the user's file."""

    def __init__(self) -> None:
        super().__init__(Block)
        GLOBAL["calls"] = 0

    def forward(self, x: Tensor) -> Tensor:
        GLOBAL["calls"] += 1
        return super().forward(x) * GLOBAL["calls"]


class RandomOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


class LayerDrop(Stack):
    """Leaves out blocks by Python's random numbers, in the loop over them."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.training and random.random() < 0.5:
                continue
            x = x + block(x)
        return self.last(x)


class TorchLayerDrop(Stack):
    """The same by PyTorch's."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.training and torch.rand([]) < 0.5:
                continue
            x = x + block(x)
        return self.last(x)


class ParityOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] % 2 == 0 else super().forward(x) * 10


class LengthOutside(Stack):
    """Pads to a multiple of four."""

    def __init__(self) -> None:
        super().__init__(Recurrent)

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % 4
        return super().forward(F.pad(x, (0, 0, 0, missing)))[:, : x.shape[1]]


class LongerIsDeeper(Stack):
    """Leaves out the last block for short sequences."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks if x.shape[1] > 9 else list(self.blocks)[:-1]:
            x = block(x)
        return self.last(x)


class BatchOutside(Stack):
    """Depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 if x.shape[0] < 3 else x.shape[0])


class ValuesOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.mean() > 0 else y


class ItemOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * max(x.abs().max().item(), 1.0)


class IndexedOutside(Stack):
    """Boolean indexing between blocks."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :, 0] > 0
        flat = self.first(x[mask])
        for block in self.blocks:
            flat = block(flat)
        y = torch.zeros_like(x).masked_scatter(mask[..., None], flat)
        return self.last(y)


class EarlyExit(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if x.abs().mean() < 0.1:
                break
        return self.last(x)


class HookedOutside(Stack):
    """An observing hook on the whole model."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.seen: list[int] = []
        self.register_forward_hook(lambda module, inputs, output: self.seen.append(1))


class ObservedBlocks(Stack):
    """Forward hooks that collect the blocks' outputs' means, as probes do."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.seen: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, inputs, output: self.seen.append(output.detach().mean()))


class ReversalOutside(Stack):
    """Gradient reversal between the trunk and a head."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x), self.domain(Reversal.apply(x))  # type: ignore[no-untyped-call]


class StraightThroughOutside(Stack):
    """y + (round(y) - y).detach()."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (y.round() - y).detach()


class ScaledGradientOutside(Stack):
    """A hook on an activation between the blocks."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.1)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class ClampedOutside(Stack):
    """A hook on the parameter of a layer outside, that clamps large gradients only."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        self.first.register_full_backward_hook(lambda _, inputs, __: None)


class AuxiliaryAttribute(Stack):
    """Blocks leave a loss in an attribute, which the model adds up."""

    def __init__(self) -> None:
        super().__init__(Leaving)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, torch.stack([block.auxiliary for block in self.blocks]).sum()


class Leaving(Block):
    auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.auxiliary = y.square().mean()
        return y


class AuxiliaryReturned(Stack):
    """Blocks return their auxiliary loss."""

    def __init__(self) -> None:
        super().__init__(Returning)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early, total = self.first(x), x.new_zeros(())
        x = early
        for block in self.blocks:
            x, own = block(x)
            total = total + own
        return {"out": self.last(x + early), "auxiliary": total}


class Returning(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.square().mean()


class LossInside(Stack):
    """Keeps its last loss in an attribute for the user to read."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.latest = y.detach().square().mean()
        return y


class UnusedNorm(Stack):
    """BatchNorm whose output is not used: its statistics move all the same."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.side = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        self.side(x.transpose(1, 2))
        return self.last(x)


class UnusedHead(Stack):
    """An auxiliary head with BatchNorm, computed and dropped."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.auxiliary = nn.Sequential(nn.Linear(WIDTH, WIDTH), BatchNormed(), nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                self.auxiliary(x)
        return self.last(x)


class CheckpointedBlocks(Stack):
    """torch.utils.checkpoint around each block."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__(Block)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class CheckpointedSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.blocks, 2, self.first(x), use_reentrant=False)


class AutocastOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x).float()


class NoGradTrunk(Stack):
    """The first half runs under no_grad."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
            for block in self.blocks[:2]:
                x = block(x)
        for block in self.blocks[2:]:
            x = block(x)
        return self.last(x)


class VmappedOutside(Stack):
    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(super().forward)(x)


class FunctionalOutside(Stack):
    """functional_call of its blocks with weights that it computes."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.func.functional_call(block, {n: p * 0.9 for n, p in block.named_parameters()}, (x,))
        return self.last(x)


class SwitchedMode(Stack):
    """Its forward puts a frozen part in evaluation mode."""

    def __init__(self) -> None:
        super().__init__(BatchNormed)

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].eval()
        return super().forward(x)


class Momentum(nn.Module):
    """A student and a teacher that the model's forward averages (BYOL)."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Stack(Block), Stack(Block).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            for mine, its in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                its.mul_(0.9).add_(mine, alpha=0.1)
            target = self.teacher(x)
        return self.student(x), target


# How blocks are held


class TiedWords(nn.Module):
    """The embedding is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedByFunction(TiedWords):
    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embedding.weight)


class SparseWords(TiedWords):
    """A sparse embedding, which has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH, sparse=True)


class SparseSingle(SparseWords):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Bags(nn.Module):
    """EmbeddingBag with offsets as another input."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bag(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class SharedBlock(Stack):
    """ALBERT: one block four times."""

    def __init__(self) -> None:
        super().__init__(Block, blocks=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            x = self.blocks[0](x)
        return self.last(x)


class CyclicBlocks(Stack):
    """Two blocks in turn, twice: a universal transformer."""

    def __init__(self) -> None:
        super().__init__(Block, blocks=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.last(x)


class Unrolled(Stack):
    """As many passes as there are letters."""

    def __init__(self) -> None:
        super().__init__(Block, blocks=2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            for block in self.blocks:
                h = block(h + x[:, t])
        return self.last(h)


class ListsInAList(nn.Module):
    """Lucidrains: ModuleList([ModuleList([norm, attention, norm, mlp]), ...])."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH), Block()]) for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention, other, mlp in self.layers:
            x = attention(norm(x)) + x
            x = mlp(other(x)) + x
        return x


class ParallelLists(nn.Module):
    """attentions[i] and mlps[i]."""

    def __init__(self) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(Attention() for _ in range(4))
        self.mlps = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = mlp(attention(x)) + x
        return x


class ParameterListModel(nn.Module):
    """No modules at all: a list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 2 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + x
        return x


class StackedWeights(nn.Module):
    """One tensor of all layers' weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight) + x
        return x


class Attributes(nn.Module):
    """setattr(self, f'layer{i}', ...) and getattr."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(4):
            setattr(self, f"layer{number}", Block())

    def forward(self, x: Tensor) -> Tensor:
        for number in range(4):
            x = getattr(self, f"layer{number}")(x)
        return x


class NamedBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block {number}": Block() for number in range(4)})
        self.order = [f"block {number}" for number in (2, 0, 3, 1)]

    def forward(self, x: Tensor) -> Tensor:
        for name in self.order:
            x = self.blocks[name](x)
        return x


class UnetSkips(nn.Module):
    """Down, up, and skips between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(torch.cat([x, kept.pop()], -1)).tanh()
        return x


class Dense(Stack):
    """Every block reads all before it."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.first(x)]
        for block in self.blocks:
            seen.append(block(torch.stack(seen).sum(0)))
        return self.last(torch.stack(seen).mean(0))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Stack(Block, 2), Stack(Block, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) * self.right(y)


class Nested(nn.Module):
    """A model in a wrapper in a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Wrapper(Stack(Block))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Lambdas(Stack):
    """Functions in attributes, and a block that is called by another method than forward."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.activation = lambda x: F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.first(x))
        for block in self.blocks:
            x = self.run(block, x)
        return self.last(x)

    @staticmethod
    def run(block: nn.Module, x: Tensor) -> Tensor:
        return block.forward(x)  # type: ignore[no-any-return]


class OtherMethod(nn.Module):
    """Blocks with methods encode and decode."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Coder() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.encode(x)
        for block in self.blocks:
            x = block.decode(x)
        return x


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.there(x).tanh()

    def decode(self, x: Tensor) -> Tensor:
        return self.back(x).tanh()


class GeneratedBlocks(Stack):
    """A generator over blocks, and a comprehension."""

    def __init__(self) -> None:
        super().__init__(Block)

    def outputs(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.stack(list(self.outputs(self.first(x)))).mean(0))


# What goes in and out


class Pair(NamedTuple):
    out: Tensor
    hidden: Tensor


@dataclasses.dataclass
class Result:
    out: Tensor
    hidden: Tensor
    name: str = "result"


class Returns(Stack):
    def __init__(self, make: Any) -> None:
        super().__init__(Block)
        self._make = make

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self._make(self.last(hidden), hidden)


class ComplexBlocks(nn.Module):
    """Complex numbers travel between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ComplexBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.complex(x, torch.zeros_like(x))
        for block in self.blocks:
            z = block(z)
        return torch.view_as_real(z).flatten(-2)


class ComplexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, z: Tensor) -> Tensor:
        a, b = self.real(z.real) - self.imaginary(z.imag), self.real(z.imag) + self.imaginary(z.real)
        return z + torch.complex(a.tanh(), b)


class ComplexParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rotation() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Rotation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.phase).real + x


class Masks(Stack):
    """An attention mask made of a padding mask, given to every block."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return self.last(x)


class Dated(Stack):
    """A dict of inputs with a nested tuple."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        x, (shift, _) = batch["x"], batch["rest"]
        return super().forward(x + shift)


class InputWritten(Stack):
    """Writes its input in place."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return super().forward(x)


class InPlaceBetween(Stack):
    """In-place operators between blocks, on what blocks have returned."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            y = block(x)
            y = y + x
            y.mul_(0.5)
            y[:, 0] += 1
            x = y
        return self.last(x)


class ViewsBetween(Stack):
    """A block returns a view of its input, which the model then writes."""

    def __init__(self) -> None:
        super().__init__(Viewing)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).clone()
        for block in self.blocks:
            view, y = block(x)
            view.add_(y)
        return self.last(x)


class Viewing(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, 1:], super().forward(x)[:, 1:].detach().clone() * self.linear.bias


class Captum(Stack):
    """Constants that are made anew in every forward, on the fly."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))
        return super().forward(mask @ x / x.shape[1] + positions + torch.tensor(0.5, dtype=x.dtype))


class PadAndPack(nn.Module):
    """Packed sequences between recurrent blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0]) % 3 + x.shape[1] - 2
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            packed, _ = layer(packed)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])[0]


class Jagged(Stack):
    """A nested tensor between."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        nested = torch.nested.as_nested_tensor(list(x.unbind(0)), layout=torch.jagged)
        return super().forward(nested).to_padded_tensor(0.0)


def frozen_part() -> nn.Module:
    model = Stack(Block)
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def frozen_end() -> nn.Module:
    model = Stack(Block)
    model.blocks[2:].requires_grad_(False)
    model.last.requires_grad_(False)
    return model


def evaluated_norm() -> nn.Module:
    """Frozen BatchNorm: evaluation mode inside of a model that trains; the loop calls train() before."""
    model = FrozenNorm()
    return model


class FrozenNorm(Stack):
    def __init__(self) -> None:
        super().__init__(BatchNormed)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        for block in self.blocks[:2]:
            block.norm.eval()
        return self


def unused() -> nn.Module:
    model = Stack(Block)
    model.spare = nn.Linear(WIDTH, WIDTH)
    return model


# What users change between steps


def warmer(model: nn.Module, step: int) -> None:
    model.blocks[1].linear.bias.data.add_(0.1 * step)  # type: ignore[union-attr,index]


def freeze(model: nn.Module, step: int) -> None:
    if step == 1:
        model.blocks[0].requires_grad_(False)  # type: ignore[index,union-attr]


def unfreeze(model: nn.Module, step: int) -> None:
    model.blocks[0].requires_grad_(step > 0)  # type: ignore[index,union-attr]


def still(model: nn.Module, step: int) -> None:
    if step == 1:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()


def slower(model: nn.Module, step: int) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 0.1 / (step + 1)


def replace_data(model: nn.Module, step: int) -> None:
    if step == 1:
        weight = model.blocks[1].linear.weight  # type: ignore[index,union-attr]
        weight.data = weight.data * 0.5


def replace_parameter(model: nn.Module, step: int) -> None:
    if step == 1:
        linear = model.blocks[1].linear  # type: ignore[index,union-attr]
        linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


def replace_buffer(model: nn.Module, step: int) -> None:
    if step == 1:
        model.blocks[1].book = torch.ones(WIDTH, dtype=torch.float64)  # type: ignore[index,union-attr]


def replace_block(model: nn.Module, step: int) -> None:
    if step == 1:
        torch.manual_seed(3)
        model.blocks[1] = Block().double()  # type: ignore[index,operator]


def write_in_place(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def load(model: nn.Module, step: int) -> None:
    if step == 1:
        torch.manual_seed(3)
        model.load_state_dict({name: torch.randn_like(value) / 3 for name, value in model.state_dict().items()})


def heat_inside(model: nn.Module, step: int) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        block.temperature = 1.0 + step


def heat_outside(model: nn.Module, step: int) -> None:
    model.temperature = 1.0 + step  # type: ignore[assignment]


def late_hook(model: nn.Module, step: int) -> None:
    if step == 1:
        model.blocks[1].linear.weight.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[index,union-attr]


def late_forward_hook(model: nn.Module, step: int) -> None:
    if step == 1:
        model.blocks[1].register_forward_hook(lambda _, __, output: output * 0.5)  # type: ignore[index,union-attr]


def late_model_hook(model: nn.Module, step: int) -> None:
    if step == 1:
        model.register_forward_hook(lambda _, __, output: output * 0.5)


def to_eval(model: nn.Module, step: int) -> None:
    model.train(step != 1)


class Tempered(Block):
    temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


class TemperedOutside(Stack):
    temperature = 1.0

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.temperature


def pair(samples: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, WIDTH), torch.randn(samples, length, WIDTH)


def padded(samples: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, WIDTH), torch.arange(length).expand(samples, -1) > length - 3


def dated(samples: int, length: int) -> tuple[dict[str, Any]]:
    return ({"x": torch.randn(samples, length, WIDTH), "rest": (torch.randn(samples, 1, 1), torch.ones(()))},)


OUTSIDE = (
    BookOutside, ReassignedOutside, CounterOutside, TensorCounterOutside, PlainTensorOutside, ListOutside,
    GlobalOutside, ParityOutside, LengthOutside, LongerIsDeeper, BatchOutside, ValuesOutside, ItemOutside,
    IndexedOutside, EarlyExit, HookedOutside, ObservedBlocks, ReversalOutside, StraightThroughOutside,
    ScaledGradientOutside, ClampedOutside, AuxiliaryAttribute, AuxiliaryReturned, LossInside, UnusedNorm, UnusedHead,
    CheckpointedBlocks, CheckpointedSequential, AutocastOutside, NoGradTrunk, VmappedOutside, FunctionalOutside,
    SwitchedMode, Momentum, InputWritten, InPlaceBetween, ViewsBetween, Captum, PadAndPack, Jagged,
)  # fmt: skip
HELD = (
    SharedBlock, CyclicBlocks, Unrolled, ListsInAList, ParallelLists, ParameterListModel, StackedWeights, Attributes,
    NamedBlocks, UnetSkips, Dense, Nested, Lambdas, OtherMethod, GeneratedBlocks, ComplexBlocks, ComplexParameter,
)  # fmt: skip
SEQUENTIAL = {
    "nn.Sequential": lambda: nn.Sequential(*(Block() for _ in range(4))),
    "nn.Sequential of EmaBook": lambda: nn.Sequential(*(EmaBook() for _ in range(4))),
    "nn.Sequential of Counter": lambda: nn.Sequential(*(Counter() for _ in range(4))),
    "nn.Sequential of GradientMask": lambda: nn.Sequential(*(GradientMask() for _ in range(4))),
    "nn.Sequential of Routed": lambda: nn.Sequential(*(Routed() for _ in range(4))),
    "nn.Sequential of Parity": lambda: nn.Sequential(*(Parity() for _ in range(4))),
}
RETURNS = {
    "a tuple": lambda out, hidden: (out, hidden),
    "a dict": lambda out, hidden: {"out": out, "hidden": hidden, "name": "x"},
    "a named tuple": Pair,
    "a dataclass": Result,
    "None and numbers": lambda out, hidden: (out, None, 3, [hidden]),
}
CHANGES = {
    "load_state_dict": (lambda: Stack(Block), load),
    "writes in place": (lambda: Stack(Block), write_in_place),
    "bias.data.add_": (lambda: Stack(Block), warmer),
    "requires_grad_(False)": (lambda: Stack(Block), freeze),
    "requires_grad_(True)": (lambda: Stack(Block), unfreeze),
    "bn.eval()": (lambda: Stack(BatchNormed), still),
    "bn.momentum": (lambda: Stack(BatchNormed), slower),
    "p.data = ...": (lambda: Stack(Block), replace_data),
    "a new nn.Parameter": (lambda: Stack(Block), replace_parameter),
    "a new buffer": (lambda: Stack(EmaBook), replace_buffer),
    "a new block": (lambda: Stack(Block), replace_block),
    "block.temperature": (lambda: Stack(Tempered), heat_inside),
    "model.temperature": (TemperedOutside, heat_outside),
    "register_hook": (lambda: Stack(Block), late_hook),
    "a hook on a block": (lambda: Stack(Block), late_forward_hook),
    "a hook on the model": (lambda: Stack(Block), late_model_hook),
    "model.eval()": (lambda: Stack(BatchNormed), to_eval),
    "nn.Sequential, p.data = ...": (
        lambda: nn.Sequential(Block(), Block(), Block()),
        lambda model, step: replace_data(Blocks(model), step),
    ),
    "nn.Sequential, requires_grad_(False)": (
        lambda: nn.Sequential(Block(), Block(), Block()),
        lambda model, step: freeze(Blocks(model), step),
    ),
}


class Blocks(nn.Module):
    """Shows the elements of a sequence as `blocks`."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks


def transformer(norm_first: bool) -> nn.Module:
    return nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first)


class CausalEncoder(nn.Module):
    def __init__(self, causal: bool | None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.causal = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.encoder(x, mask=mask, is_causal=self.causal)


def vectors(samples: int, length: int) -> tuple[Tensor]:
    return (torch.randn(samples, length, 8),)


def two_vectors(samples: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, length, 8), torch.randn(samples, length - 2, 8)


CASES: tuple[Case, ...] = (
    *(Case(kind.__name__, "outside of blocks", kind, draw) for kind in OUTSIDE),
    Case("CheckpointedBlocks, reentrant", "outside of blocks", lambda: CheckpointedBlocks(True), draw),
    *(
        Case(kind.__name__, "outside of blocks", kind, draw, microbatches=1, draws=True)
        for kind in (RandomOutside, LayerDrop, TorchLayerDrop)
    ),
    *(Case(kind.__name__, "how blocks are held", kind, draw) for kind in HELD),
    *(Case(kind.__name__, "how blocks are held", kind, words) for kind in (TiedWords, TiedByFunction, Bags)),
    *(Case(kind.__name__, "how blocks are held", kind, words) for kind in (SparseWords, SparseSingle)),
    *(Case(name, "how blocks are held", make, draw) for name, make in SEQUENTIAL.items()),
    Case("TwoTowers", "inputs and outputs", TwoTowers, pair),
    Case("Masks", "inputs and outputs", Masks, padded),
    Case("a nested dict", "inputs and outputs", Dated, dated),
    *(Case(name, "inputs and outputs", lambda make=make: Returns(make), draw) for name, make in RETURNS.items()),
    Case("frozen beginning", "what is trained", frozen_part, draw),
    Case("frozen end", "what is trained", frozen_end, draw),
    Case("frozen BatchNorm", "what is trained", evaluated_norm, draw),
    Case("unused parameters", "what is trained", unused, draw),
    *(
        Case(name, "changes between steps", make, draw, between=between)
        for name, (make, between) in CHANGES.items()
    ),
    Case("nn.Transformer", "torch.nn", lambda: transformer(False), two_vectors),
    Case("nn.Transformer, norm first", "torch.nn", lambda: transformer(True), two_vectors),
    Case("nn.TransformerEncoder, causal mask", "torch.nn", lambda: CausalEncoder(None), vectors),
    Case("nn.TransformerEncoder, is_causal", "torch.nn", lambda: CausalEncoder(True), vectors),
    Case("Dropping, RandomDepth", "random numbers in blocks",
         lambda: Stack(lambda: nn.Sequential(Dropping(), RandomDepth())), draw, microbatches=1, draws=True),
)  # fmt: skip
