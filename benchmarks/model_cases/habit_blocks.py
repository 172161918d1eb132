"""Habits inside of blocks: state that a forward leaves, hooks, control flow, random numbers.

A family is a kind of habit. `Stack` has blocks of one kind between two linear layers, and a connection over all of
them, so that something of the model is in no block.
"""

import functools
import random
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from model_cases import modules
from model_cases.cases import LENGTH, Case, arguments, normal
from model_cases.modules import Build, Habit, Inner, Prepare, adds, holds, many

__all__ = ["CASES", "KINDS", "WIDTH", "Block", "Stack", "draw"]

WIDTH = 6
draw = arguments(normal(LENGTH, WIDTH))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Block(nn.Module):
    """A block with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Stack(nn.Module):
    """Blocks of one kind, and a connection over all of them, which only a trace of the model finds."""

    def __init__(self, kind: Build = Block, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(kind() for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = x = self.first(x)
        return self.last(self.run(x) + early)

    def run(self, x: Tensor) -> Tensor:
        """What the blocks compute, one after the other."""
        return modules.in_order(self.blocks, x)  # type: ignore[no-any-return]


def plain(block: Any, inner: Inner, x: Tensor) -> Any:
    return inner(x)


def does(habit: Habit = plain, prepare: Prepare | None = None, **state: Any) -> Build:
    """Makes blocks with a habit, a state, and what is done once with each of them."""
    return partial(modules.with_habit(Block), habit, prepare, state)


def changed(change: Callable[[Any, Tensor], Any]) -> Habit:
    """Does something to what the block computes."""
    return lambda block, inner, x: change(block, inner(x))


def residual(change: Callable[[Any, Tensor], Any]) -> Habit:
    """Does something to what the block computes, and adds the input."""
    return lambda block, inner, x: x + change(block, inner(x))


def replaced(make: Callable[[nn.Linear], Any], habit: Habit = plain) -> Build:
    """Makes blocks with something else than a linear layer, made from one."""
    return does(habit, lambda block: setattr(block, "linear", make(linear())))


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


def quantize(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """VQ-VAE: nearest code, straight-through, codes averaged."""
    y: Tensor = block.linear(x)
    nearest = torch.cdist(y, block.codes).argmin(-1)
    quantized = F.embedding(nearest, block.codes)
    if block.training:
        with torch.no_grad():
            hot = F.one_hot(nearest, 5).to(y.dtype).flatten(0, -2)
            block.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            block.codes.lerp_(hot.T @ y.flatten(0, -2) / block.counts[:, None], 0.1)
    return y + (quantized - y).detach() * 0.5


def enqueue(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """MoCo: a queue with a pointer."""
    y = block.linear(x)
    scores = y @ block.queue.clone().detach().T
    with torch.no_grad():
        at = int(block.pointer)
        keys = y.mean(1)[:2]
        block.queue[at : at + len(keys)] = keys
        block.pointer[0] = (at + 2) % 16
    return torch.tanh(scores[..., :WIDTH])


def buffers(**made: Callable[[], Tensor]) -> Prepare:
    def prepare(block: nn.Module) -> None:
        for name, make in made.items():
            block.register_buffer(name, make())

    return prepare


class Counter(Block):
    """Counts its calls, and keeps a list and a tensor that is not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.memory, self.plain = 0, [0.0], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory.append(0.1 * self.calls)
        self.plain = self.plain + 0.01
        return super().forward(x) * min(self.calls, 7) + self.memory[-2] + self.plain.to(x)


def warm_up(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """Is stronger with every training forward, up to the fourth."""
    block.steps += block.training
    return x + inner(x) * min(1.0, block.steps / 4)


def follow(average: nn.Module, module: nn.Module) -> None:
    """Moves the weights of an average towards those of a module."""
    with torch.no_grad():
        for mine, its in zip(module.parameters(), average.parameters(), strict=True):
            its.mul_(0.9).add_(mine, alpha=0.1)


def add_twin(block: Any, inner: Inner, x: Tensor) -> Any:
    """A BYOL target that its own forward averages."""
    follow(block.target, block.linear)
    return inner(x) + block.target(x)


twin = adds(target=lambda: linear().requires_grad_(False))


class BatchNormed(Block):
    """A norm that has statistics."""

    def __init__(self, norm: Callable[..., nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.norm = norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(super().forward(x).transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.rnn = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


def carry(block: Any, inner: Inner, x: Tensor) -> Any:
    """Carries its hidden state from call to call, detached: truncated backpropagation through time."""
    state = block.state if block.state is not None and block.state.shape[1] == x.shape[0] else None
    y, state = block.rnn(x, state)
    block.state = state.detach()
    return x + y


class Cached(Block):
    """functools.cache of a table by length."""

    @functools.cache  # noqa: B019
    def table(self, length: int) -> Tensor:
        return torch.sin(torch.arange(length, dtype=torch.float64))[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) + self.table(x.shape[1]).to(x)


def grow_table(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """Has a buffer of positions that grows when it is too short."""
    if len(block.table) < x.shape[1]:
        block.table = torch.sin(torch.arange(x.shape[1], dtype=x.dtype))[:, None]
    return x + inner(x) + block.table[: x.shape[1]]


STATE: dict[str, Build] = {
    "EmaBook": EmaBook,
    "ReassignedBuffer": ReassignedBuffer,
    "BufferData": BufferData,
    "BookFirst": BookFirst,
    "VectorQuantizer": does(quantize, buffers(codes=lambda: torch.randn(5, WIDTH), counts=lambda: torch.ones(5))),
    "Queue": does(
        enqueue, buffers(queue=lambda: torch.randn(16, WIDTH), pointer=lambda: torch.zeros(1, dtype=torch.long))
    ),
    "Counter": Counter,
    "WarmUp": does(warm_up, steps=0),
    "MomentumTwin": does(add_twin, twin),
    "BatchNormed": BatchNormed,
    "CumulativeNormed": lambda: BatchNormed(partial(nn.BatchNorm1d, momentum=None)),
    "InstanceNormed": lambda: BatchNormed(partial(nn.InstanceNorm1d, affine=True, track_running_stats=True)),
    "Stateful": partial(modules.with_habit(Recurrent), carry, None, {"state": None}),
    "Cached": Cached,
    "GrowingTable": does(grow_table, lambda block: block.register_buffer("table", torch.zeros(0, 1), persistent=False)),
}

# Random numbers


def skip_by(drawn: Callable[[], Any]) -> Habit:
    """Skips the block when a random number says so."""
    return lambda block, inner, x: x if block.training and drawn() < 0.5 else x + inner(x)


def sample(block: Any, y: Tensor) -> Any:
    """torch.distributions."""
    normal = torch.distributions.Normal(y, F.softplus(y) + 0.1)
    return normal.rsample() if block.training else normal.mean


RANDOM: dict[str, Build] = {
    "RandomDepth": does(skip_by(random.random)),
    "NumpyMask": does(
        residual(
            lambda block, y: y * (torch.from_numpy(numpy.random.rand(WIDTH) < 0.5).to(y) if block.training else 0.5)
        )
    ),
    # Read as a Python number.
    "TorchDepth": does(skip_by(lambda: float(torch.rand(())))),
    # Stochastic depth for every sample.
    "DropPath": does(
        residual(lambda block, y: y * (torch.rand(len(y), 1, 1, dtype=y.dtype) < 0.7 if block.training else 0.7))
    ),
    "Dropping": does(changed(lambda block, y: F.dropout(y, 0.3, block.training))),
    "Noisy": does(changed(lambda block, y: y + 0.1 * torch.randn_like(y) if block.training else y)),
    "GumbelBlock": does(residual(lambda block, y: F.gumbel_softmax(y) if block.training else y.softmax(-1))),
    "Sampler": does(residual(sample)),
}

# Hooks and gradients


def function(name: str, forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """A function with a backward of its own; both take a context first."""
    made = type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )
    return lambda *inputs: made.apply(*inputs)  # type: ignore[attr-defined]


def step(ctx: Any, x: Tensor) -> Tensor:
    ctx.save_for_backward(x)
    return (x > 0).to(x)


def scale(ctx: Any, x: Tensor, factor: float) -> Tensor:
    ctx.factor = factor
    return x.clone()


reverse = function("Reversal", lambda ctx, x: x.view_as(x), lambda ctx, gradient: -gradient)
# Straight through, clamped where gradients are large.
round_straight = function("Rounding", lambda ctx, x: x.round(), lambda ctx, gradient: gradient.clamp(-0.01, 0.01))
# A spiking neuron's step.
surrogate = function("Surrogate", step, lambda ctx, gradient: gradient / (1 + 10 * ctx.saved_tensors[0].abs()) ** 2)
scale_gradient = function("Scaling", scale, lambda ctx, gradient: (gradient * ctx.factor, None))


def spike(block: Any, inner: Inner, x: Tensor) -> Tensor:
    potential, spikes = torch.zeros_like(x[:, 0]), []
    current = block.linear(x)
    for t in range(x.shape[1]):
        potential = 0.8 * potential + current[:, t]
        spike = surrogate(potential - 0.5)
        potential = potential - spike.detach()
        spikes.append(spike)
    return x + torch.stack(spikes, 1)


def penalize(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """A gradient penalty inside of the forward: autograd.grad with create_graph."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(inner(point).sum(), point, create_graph=True)
    return x + force


def adapt_gradients(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """Gradient scaling by a Python number that changes from call to call."""
    block.calls += 1
    return scale_gradient(x + inner(x), 1 / block.calls)


def hook_result(block: Any, inner: Inner, x: Tensor) -> Tensor:
    y: Tensor = inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


def halve_gradient(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)  # type: ignore[union-attr]


def mask_gradients(block: Any) -> None:
    mask = torch.arange(WIDTH) % 2
    block.linear.weight.register_hook(lambda gradient: gradient * mask)


def replace_by_hooks(block: Any) -> None:
    block.linear.register_forward_hook(lambda module, inputs, output: output * 0.5)
    block.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))


def count_calls(block: Any, module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A hook that only looks."""
    block.seen += 1


GRADIENTS: dict[str, Build] = {
    "GradientMask": does(prepare=mask_gradients),
    "AfterAccumulation": does(
        prepare=lambda block: block.linear.weight.register_post_accumulate_grad_hook(halve_gradient)
    ),
    "ClampedBackward": does(
        prepare=lambda block: block.register_full_backward_hook(
            lambda _, inputs, __: tuple(each.clamp(-1e-3, 1e-3) for each in inputs)
        )
    ),
    "PreBackward": does(
        prepare=lambda block: block.register_full_backward_pre_hook(
            lambda _, outputs: tuple(each * 0.5 for each in outputs)
        )
    ),
    "Observed": does(prepare=lambda block: block.linear.register_forward_hook(MethodType(count_calls, block)), seen=0),
    "Replacing": does(prepare=replace_by_hooks),
    "TensorHook": does(hook_result),
    "Reversing": does(changed(lambda block, y: reverse(y))),
    "StraightThrough": does(residual(lambda block, y: round_straight(y * 4) / 4)),
    "Spiking": does(spike),
    "Penalized": does(penalize),
    "AnomalyFree": does(residual(lambda block, y: torch.cat([y[..., :3], y[..., 3:].detach()], -1))),
    "AdaptiveGradient": does(adapt_gradients, calls=0),
}

# Control flow


def parity(block: Any, inner: Inner, x: Tensor) -> Any:
    """Depends on the length."""
    return inner(x) if x.shape[1] % 2 == 0 else inner(x) * 10


def route(block: Any, x: Tensor) -> Tensor:
    """A mixture of experts that loops over experts, with boolean indexing."""
    flat = x.flatten(0, 1)
    weights, chosen = block.router(flat).softmax(-1).topk(2)
    y = torch.zeros_like(flat)
    for number, expert in enumerate(block.experts):
        rows, slots = torch.where(chosen == number)
        if len(rows) == 0:
            continue
        y.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
    return x + y.view_as(x)


def double_chosen(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """Decides by the data, and indexes by a mask."""
    y: Tensor = inner(x)
    chosen = y.sum(-1) > 0
    if chosen.any():
        y = y.clone()
        y[chosen] = y[chosen] * 2
    return y


def halt(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """Adaptive computation: repeats itself until its mean is small."""
    for _ in range(5):
        x = inner(x)
        if x.abs().mean() < 0.3:
            break
    return x


def order_by_numpy(block: Any, inner: Inner, x: Tensor) -> Any:
    """Goes through NumPy for something without a gradient."""
    y = inner(x)
    order = numpy.argsort(y.detach().mean((0, 2)).numpy())
    return y[:, torch.from_numpy(order.copy())] + x


def assert_values(block: Any, inner: Inner, x: Tensor) -> Any:
    assert torch.isfinite(x).all(), "not finite"
    assert x.shape[-1] == WIDTH
    return x + inner(x)


def print_mean(block: Any, inner: Inner, x: Tensor) -> Any:
    print("mean", x.mean())
    return x + inner(x)


def catch(block: Any, inner: Inner, x: Tensor) -> Any:
    try:
        torch.linalg.cholesky(block.linear.weight @ block.linear.weight.T - 10 * torch.eye(WIDTH).to(x))
    except torch.linalg.LinAlgError:
        return x + inner(x)
    return x


FLOW: dict[str, Build] = {
    "Parity": does(parity),
    "Routed": holds(route, router=lambda: nn.Linear(WIDTH, 3), experts=many(linear, 3)),
    "Masked": does(double_chosen),
    "ByItem": does(changed(lambda block, y: y / max(y.abs().max().item(), 0.1))),
    "Halting": does(halt),
    "ThroughNumpy": does(order_by_numpy),
    "Assertive": does(assert_values),
    "Printing": does(print_mean),
    "Catching": does(catch),
}

# Kinds of modules and of calls


def add_low_rank(block: Any) -> None:
    """LoRA by hand, on a frozen layer."""
    block.linear.requires_grad_(False)
    block.down, block.up = modules.weight(2, WIDTH, over=4)(), modules.weight(WIDTH, 2, over=4)()


def pack(x: Tensor, run: Callable[[Any], Any]) -> Tensor:
    """What `run` makes of packed sequences of several lengths, padded again."""
    lengths = torch.arange(x.shape[0]) % 3 + x.shape[1] - 2
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(run(packed), batch_first=True, total_length=x.shape[1])[0]


def run_packed(block: Any, inner: Inner, x: Tensor) -> Tensor:
    return x + pack(x, lambda packed: block.rnn(packed)[0])


def loop_over_cell(block: Any, x: Tensor) -> Tensor:
    state, found = None, []
    for t in range(x.shape[1]):
        state = block.cell(x[:, t], state)
        found.append(state[0])
    return x + torch.stack(found, 1)


def apply_lists(block: Any, x: Tensor) -> Tensor:
    for each in block.weights:
        x = x + torch.tanh(x @ each) * block.named["scale"]
    return x


def filter_spectrum(block: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=-1) * torch.view_as_complex(block.filter)
    return x + torch.fft.irfft(spectrum, n=WIDTH, dim=-1)


pairs = does(lambda block, inner, pair: (pair[1] + inner(pair[0]), pair[0]))


class Reversible(modules.InOrder):
    """Blocks that pass a pair on."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = super().forward((x, x))
        return first + second


def lazy() -> nn.Module:
    """A LazyLinear that was run once."""
    linear = nn.LazyLinear(WIDTH)
    linear(torch.randn(1, WIDTH))
    return linear


def attend(block: Any, x: Tensor) -> Tensor:
    y = block.norm(x)
    return x + block.attention(y, y, y, need_weights=False)[0]


attention = partial(nn.MultiheadAttention, WIDTH, 2, batch_first=True)


def gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def write_in_place(block: Any, inner: Inner, x: Tensor) -> Any:
    y = block.linear(x)
    y[:, 0] = 0
    y[..., 1:3].mul_(2)
    y.tanh_()
    return y + x


def autocast(block: Any, inner: Inner, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block.linear(x.float())
    return x + y.to(x).tanh()


def take_exponential(block: Any, inner: Inner, x: Tensor) -> Any:
    """A matrix exponential and an inverse."""
    skew = block.linear.weight - block.linear.weight.T
    return x @ torch.linalg.matrix_exp(skew) + torch.linalg.solve(torch.eye(WIDTH).to(x) + skew, x.mT).mT


OF_MODULES: dict[str, Build] = {
    "Scripted": replaced(torch.jit.script),
    "Traced": replaced(
        lambda linear: torch.jit.trace(linear, torch.randn(2, 8, WIDTH), check_trace=False)  # type: ignore[no-untyped-call]
    ),
    "Reentrant": does(lambda block, inner, x: x + checkpoint(inner, x, use_reentrant=True)),
    "Checkpointed": does(lambda block, inner, x: x + checkpoint(inner, x, use_reentrant=False)),
    "Mapped": does(lambda block, inner, x: x + torch.vmap(inner)(x)),
    "Functional": does(
        lambda block, inner, x: (
            x + torch.func.functional_call(block.linear, dict(block.linear.named_parameters()), (x,)).tanh()
        )
    ),
    "Jacobian": does(lambda block, inner, x: x + torch.func.jvp(inner, (x,), (torch.ones_like(x),))[1]),
    # stack_module_state and vmap over parameters.
    "Ensemble": holds(
        lambda block, x: x + torch.vmap(lambda weight: torch.tanh(x @ weight))(block.weights).mean(0),
        weights=modules.weight(3, WIDTH, WIDTH, over=3),
    ),
    "WeightNormed": replaced(parametrizations.weight_norm),
    "OldWeightNormed": replaced(weight_norm),
    "SpectralNormed": replaced(parametrizations.spectral_norm),
    "OldSpectralNormed": replaced(spectral_norm),
    "Orthogonal": replaced(parametrizations.orthogonal),
    "Pruned": replaced(lambda linear: prune.l1_unstructured(linear, "weight", amount=0.4)),  # type: ignore[no-untyped-call]
    "LowRank": does(lambda block, inner, x: inner(x) + x @ block.down.T @ block.up.T, add_low_rank),
    "Recurrent": Recurrent,
    "PackedSequences": partial(modules.with_habit(Recurrent), run_packed, None, {}),
    "CellLoop": holds(loop_over_cell, cell=lambda: nn.LSTMCell(WIDTH, WIDTH)),
    "ParameterLists": holds(
        apply_lists,
        weights=lambda: nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(2)),
        named=lambda: nn.ParameterDict({"scale": torch.ones(WIDTH)}),
    ),
    "Complex": holds(filter_spectrum, filter=modules.weight(WIDTH // 2 + 1, 2)),
    "InPlace": does(write_in_place),
    "WritesItsInput": does(lambda block, inner, x: x.add_(1) + inner(x)),
    "Autocasting": does(autocast),
    # It computes in float32, whatever it is given.
    "Inner32": does(
        lambda block, inner, x: (
            x + F.linear(x.float(), block.linear.weight.float(), block.linear.bias.float()).tanh().to(x)
        )
    ),
    "Einsum": holds(
        lambda block, x: x + torch.einsum("blw,hwk->blhk", x, block.weight).flatten(2),
        weight=modules.weight(2, WIDTH, 3, over=4),
    ),
    # A weight that it computes from two parameters and gives to a function.
    "NonLeafWeight": does(
        lambda block, inner, x: x + F.linear(x, block.linear.weight * block.scale.exp()).tanh(),
        scale=nn.Parameter(torch.ones(WIDTH, 1)),
    ),
    "Lazy": holds(lambda block, x: x + block.linear(x).tanh(), linear=lazy),
    "ScriptedFunction": does(
        lambda block, inner, x: x + block.gate(block.linear(x)),
        lambda block: setattr(block, "gate", torch.jit.script(gate)),
    ),
    "Exponential": does(take_exponential),
    "Attention": holds(attend, attention=attention, norm=partial(nn.LayerNorm, WIDTH)),
    "LSTM": lambda: Recurrent(nn.LSTM),
}

KINDS = STATE | RANDOM | GRADIENTS | FLOW | OF_MODULES
"""All kinds of blocks by the names of their cases."""


def stacked(family: str, kinds: Mapping[str, Build], **options: Any) -> list[Case]:
    """Cases of stacks of blocks, by the names of the kinds of blocks."""
    return [Case(name, family, partial(Stack, kind), draw, **options) for name, kind in kinds.items()]


CASES: tuple[Case, ...] = (
    *stacked("state in blocks", STATE),
    *stacked("random numbers in blocks", RANDOM, microbatches=1, draws=True),
    *stacked("hooks and gradients in blocks", GRADIENTS),
    *stacked("control flow in blocks", FLOW),
    *stacked("kinds of blocks", OF_MODULES),
    Case("Reversible", "kinds of blocks", partial(Reversible, pairs), draw),
)
