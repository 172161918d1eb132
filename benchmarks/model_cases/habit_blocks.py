"""Habits inside of blocks: state that a forward leaves, hooks, control flow, random numbers."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from model_cases.cases import Case

__all__ = ["CASES", "WIDTH", "Block", "Stack", "draw", "stacked"]

WIDTH = 6


class Block(nn.Module):
    """A block with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Stack(nn.Module):
    """Four blocks of one kind, and a connection over all of them."""

    def __init__(self, kind: Callable[[], nn.Module], blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x + early)


def draw(samples: int, length: int) -> tuple[Tensor]:
    return (torch.randn(samples, length, WIDTH),)


def stacked(name: str, kind: Callable[[], nn.Module], family: str = "state in blocks", **options: Any) -> Case:
    """A case of a stack of blocks."""
    return Case(name, family, lambda: Stack(kind), draw, **options)


# State


class EmaBook(Block):
    """A codebook that is averaged under no_grad, last of all."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("book", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + self.book
        with torch.no_grad():
            self.book.copy_(0.9 * self.book + 0.1 * y.mean((0, 1)))
        return y


class ReassignedBuffer(EmaBook):
    def forward(self, x: Tensor) -> Tensor:
        y = Block.forward(self, x) + self.book
        self.book = 0.9 * self.book + 0.1 * y.detach().mean((0, 1))
        return y


class BufferData(EmaBook):
    def forward(self, x: Tensor) -> Tensor:
        y = Block.forward(self, x) + self.book
        self.book.data = 0.9 * self.book + 0.1 * y.detach().mean((0, 1))
        return y


class BookFirst(EmaBook):
    """Reads and writes the buffer before anything else."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.book.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        return Block.forward(self, x) + self.book.clone()


class VectorQuantizer(nn.Module):
    """VQ-VAE: nearest code, straight-through, codes averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        nearest = torch.cdist(y, self.codes).argmin(-1)
        quantized = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 5).to(y.dtype).flatten(0, -2)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.codes.lerp_(hot.T @ y.flatten(0, -2) / self.counts[:, None], 0.1)
        return y + (quantized - y).detach() * 0.5


class Queue(nn.Module):
    """MoCo: a queue with a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.randn(16, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        scores = y @ self.queue.clone().detach().T
        with torch.no_grad():
            at = int(self.pointer)
            keys = y.mean(1)[:2]
            self.queue[at : at + len(keys)] = keys
            self.pointer[0] = (at + 2) % 16
        return torch.tanh(scores[..., :WIDTH])


class Counter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.memory, self.plain = 0, [0.0], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory.append(0.1 * self.calls)
        self.plain = self.plain + 0.01
        return super().forward(x) * min(self.calls, 7) + self.memory[-2] + self.plain.to(x)


class WarmUp(Block):
    """Stronger with every training forward, up to the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        return x + super().forward(x) * min(1.0, self.steps / 4)


class RandomDepth(Block):
    """Skips itself by Python's random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + super().forward(x)


class NumpyMask(Block):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy(numpy.random.rand(WIDTH) < 0.5).to(x)
        return x + super().forward(x) * (mask if self.training else 0.5)


class TorchDepth(Block):
    """Skips itself by PyTorch's random numbers, read as a Python number."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < 0.5:
            return x
        return x + super().forward(x)


class DropPath(Block):
    """Stochastic depth for every sample."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.rand(x.shape[0], 1, 1, dtype=x.dtype) < 0.7
        return x + super().forward(x) * (keep if self.training else 0.7)


class Dropping(Block):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.1 * torch.randn_like(y) if self.training else y


class GumbelBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return x + (F.gumbel_softmax(y) if self.training else y.softmax(-1))


class MomentumTwin(Block):
    """A BYOL target that its own forward averages."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.linear.parameters(), self.target.parameters(), strict=True):
                its.mul_(0.9).add_(mine, alpha=0.1)
        return super().forward(x) + self.target(x)


class BatchNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class CumulativeNormed(BatchNormed):
    """momentum=None: a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)


class InstanceNormed(BatchNormed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)  # type: ignore[assignment]


# Hooks and gradients


class GradientMask(Block):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.arange(WIDTH) % 2
        self.linear.weight.register_hook(lambda gradient: gradient * mask)


class AfterAccumulation(Block):
    def __init__(self) -> None:
        super().__init__()

        def halve(parameter: Tensor) -> None:
            parameter.grad.mul_(0.5)  # type: ignore[union-attr]

        self.linear.weight.register_post_accumulate_grad_hook(halve)


class ClampedBackward(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_hook(lambda _, inputs, __: tuple(each.clamp(-1e-3, 1e-3) for each in inputs))


class PreBackward(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_full_backward_pre_hook(lambda _, outputs: tuple(each * 0.5 for each in outputs))


class Observed(Block):
    """A hook that only looks, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.linear.register_forward_hook(self.look)

    def look(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.seen += 1


class Replacing(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(lambda module, inputs, output: output * 0.5)
        self.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


class TensorHook(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.5)
        return y


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


class Reversing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Reversal.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


class Rounding(torch.autograd.Function):
    """Straight through, clamped where gradients are large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clamp(-0.01, 0.01)


class StraightThrough(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + Rounding.apply(super().forward(x) * 4) / 4  # type: ignore[no-untyped-call]


class Surrogate(torch.autograd.Function):
    """A spiking neuron's step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient / (1 + 10 * x.abs()) ** 2


class Spiking(Block):
    def forward(self, x: Tensor) -> Tensor:
        potential, spikes = torch.zeros_like(x[:, 0]), []
        current = self.linear(x)
        for t in range(x.shape[1]):
            potential = 0.8 * potential + current[:, t]
            spike = Surrogate.apply(potential - 0.5)  # type: ignore[no-untyped-call]
            potential = potential - spike.detach()
            spikes.append(spike)
        return x + torch.stack(spikes, 1)


class Penalized(Block):
    """A gradient penalty inside of the forward: autograd.grad with create_graph."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            energy = self.linear(point).tanh().sum()
            (force,) = torch.autograd.grad(energy, point, create_graph=True)
        return x + force


class AnomalyFree(Block):
    """Stops gradients of a half."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y[..., :3], y[..., 3:].detach()], -1) + x


# Control flow


class Parity(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] % 2 == 0 else super().forward(x) * 10


class Routed(nn.Module):
    """A mixture of experts that loops over experts, with boolean indexing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            if len(rows) == 0:
                continue
            y.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        return x + y.view_as(x)


class Masked(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        chosen = y.sum(-1) > 0
        if chosen.any():
            y = y.clone()
            y[chosen] = y[chosen] * 2
        return y


class ByItem(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y / max(y.abs().max().item(), 0.1)


class Halting(Block):
    """Adaptive computation: repeats itself until its mean is small."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = super().forward(x)
            if x.abs().mean() < 0.3:
                break
        return x


class ThroughNumpy(Block):
    """Goes through NumPy for something without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        order = numpy.argsort(y.detach().mean((0, 2)).numpy())
        return y[:, torch.from_numpy(order.copy())] + x


class Assertive(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all(), "not finite"
        assert x.shape[-1] == WIDTH
        return x + super().forward(x)


class Printing(Block):
    def forward(self, x: Tensor) -> Tensor:
        print("mean", x.mean())
        return x + super().forward(x)


class Catching(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            torch.linalg.cholesky(self.linear.weight @ self.linear.weight.T - 10 * torch.eye(WIDTH).to(x))
        except torch.linalg.LinAlgError:
            return x + super().forward(x)
        return x


class Sampler(Block):
    """torch.distributions."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        normal = torch.distributions.Normal(y, F.softplus(y) + 0.1)
        return x + (normal.rsample() if self.training else normal.mean)


# Kinds of modules and of calls


class Scripted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.script(nn.Linear(WIDTH, WIDTH))


class Traced(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.trace(nn.Linear(WIDTH, WIDTH), torch.randn(2, 8, WIDTH), check_trace=False)


class Reentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=True)


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False)


class Mapped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(super().forward)(x)


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        parameters = dict(self.linear.named_parameters())
        return x + torch.func.functional_call(self.linear, parameters, (x,)).tanh()


class Jacobian(Block):
    def forward(self, x: Tensor) -> Tensor:
        _, tangent = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return x + tangent


class Ensemble(nn.Module):
    """stack_module_state and vmap over parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(lambda weight: torch.tanh(x @ weight))(self.weights).mean(0)


class WeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class OldWeightNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))


class SpectralNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class OldSpectralNormed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH))


class Orthogonal(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


class Pruned(Block):
    def __init__(self) -> None:
        super().__init__()
        self.linear = prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.4)


class LowRank(Block):
    """LoRA by hand, on a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.T @ self.up.T


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


class PackedSequences(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(x.shape[0]) % 3 + x.shape[1] - 2
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return x + out


class CellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            found.append(state[0])
        return x + torch.stack(found, 1)


class Stateful(Recurrent):
    """Carries its hidden state from call to call, detached: truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = self.state if self.state is not None and self.state.shape[1] == x.shape[0] else None
        y, state = self.rnn(x, state)
        self.state = state.detach()
        return x + y


class ParameterLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(2))
        self.named = nn.ParameterDict({"scale": torch.ones(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(x @ weight) * self.named["scale"]
        return x


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(self.filter)
        return x + torch.fft.irfft(spectrum, n=WIDTH, dim=-1)


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[:, 0] = 0
        y[..., 1:3].mul_(2)
        y.tanh_()
        return y + x


class WritesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x + super().forward(x)


class Autocasting(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.linear(x.float())
        return x + y.to(x).tanh()


class Inner32(Block):
    """Computes in float32 inside, whatever it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x.float(), self.linear.weight.float(), self.linear.bias.float()).tanh().to(x)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, 3) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.einsum("blw,hwk->blhk", x, self.weight).flatten(2)


class TwoOutputs(Block):
    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return y + super().forward(x), x


class Reversible(nn.Module):
    """Blocks that pass a pair on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, x)
        for block in self.blocks:
            pair = block(pair)
        return pair[0] + pair[1]


class NonLeafWeight(Block):
    """Computes a weight from two parameters and gives it to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.linear.weight * self.scale.exp()).tanh()


def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class ScriptedFunction(Block):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.jit.script(gate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate(self.linear(x))


class Lazy(nn.Module):
    """A LazyLinear that was run once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(WIDTH)
        self.linear(torch.randn(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Identity(torch.autograd.Function):
    """Scales gradients by a number that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class AdaptiveGradient(Block):
    """Gradient scaling by a Python number that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Identity.apply(x + super().forward(x), 1 / self.calls)  # type: ignore[no-any-return, no-untyped-call]


class Exponential(Block):
    """A matrix exponential and an inverse."""

    def forward(self, x: Tensor) -> Tensor:
        skew = self.linear.weight - self.linear.weight.T
        return x @ torch.linalg.matrix_exp(skew) + torch.linalg.solve(torch.eye(WIDTH).to(x) + skew, x.mT).mT


class Cached(Block):
    """functools.cache of a table by length."""

    @functools.cache  # noqa: B019
    def table(self, length: int) -> Tensor:
        return torch.sin(torch.arange(length, dtype=torch.float64))[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) + self.table(x.shape[1]).to(x)


class GrowingTable(Block):
    """A buffer of positions that grows when it is too short."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(self.table) < x.shape[1]:
            self.table = torch.sin(torch.arange(x.shape[1], dtype=x.dtype))[:, None]
        return x + super().forward(x) + self.table[: x.shape[1]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


RANDOM = (RandomDepth, NumpyMask, TorchDepth, DropPath, Dropping, Noisy, GumbelBlock, Sampler)
STATE = (
    EmaBook, ReassignedBuffer, BufferData, BookFirst, VectorQuantizer, Queue, Counter, WarmUp, MomentumTwin,
    BatchNormed, CumulativeNormed, InstanceNormed, Stateful, Cached, GrowingTable,
)  # fmt: skip
GRADIENTS = (
    GradientMask, AfterAccumulation, ClampedBackward, PreBackward, Observed, Replacing, TensorHook, Reversing,
    StraightThrough, Spiking, Penalized, AnomalyFree, AdaptiveGradient,
)  # fmt: skip
FLOW = (Parity, Routed, Masked, ByItem, Halting, ThroughNumpy, Assertive, Printing, Catching)
KINDS = (
    Scripted, Traced, Reentrant, Checkpointed, Mapped, Functional, Jacobian, Ensemble, WeightNormed, OldWeightNormed,
    SpectralNormed, OldSpectralNormed, Orthogonal, Pruned, LowRank, Recurrent, PackedSequences, CellLoop,
    ParameterLists, Complex, InPlace, WritesItsInput, Autocasting, Inner32, Einsum, NonLeafWeight, Lazy,
    ScriptedFunction, Exponential, Attention,
)  # fmt: skip

CASES: tuple[Case, ...] = (
    *(stacked(kind.__name__, kind, "state in blocks") for kind in STATE),
    *(stacked(kind.__name__, kind, "random numbers in blocks", microbatches=1, draws=True) for kind in RANDOM),
    *(stacked(kind.__name__, kind, "hooks and gradients in blocks") for kind in GRADIENTS),
    *(stacked(kind.__name__, kind, "control flow in blocks") for kind in FLOW),
    *(stacked(kind.__name__, kind, "kinds of blocks") for kind in KINDS),
    stacked("LSTM", lambda: Recurrent(nn.LSTM), "kinds of blocks"),
    Case("Reversible", "kinds of blocks", Reversible, draw),
)
