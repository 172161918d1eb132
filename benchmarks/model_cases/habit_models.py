"""Habits around the blocks: what the model itself does, how it holds them, what it returns, what users change."""

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from model_cases import habit_blocks as in_blocks
from model_cases import modules
from model_cases.cases import LENGTH, Case, Draw, arguments, integers, keywords, normal
from model_cases.habit_blocks import KINDS, WIDTH, BatchNormed, Block, EmaBook, Stack, draw, linear
from model_cases.modules import Build, Habit, Inner, Prepare, adds, holds, many

__all__ = ["CASES"]

words = arguments(integers(0, 20, LENGTH))


def outside(
    habit: Habit = in_blocks.plain, prepare: Prepare | None = None, kind: Build = Block, blocks: int = 4, **state: Any
) -> Build:
    """Makes stacks with a habit, a state, and what is done once with each of them."""
    return partial(modules.with_habit(Stack), habit, prepare, state, kind, blocks)


def by_blocks(step: Callable[[Any, nn.Module, Tensor], Tensor]) -> Habit:
    """A loop over the blocks: `step` is given the model, a block and its input."""

    def habit(model: Any, inner: Inner, x: Tensor) -> Any:
        x = model.first(x)
        for block in model.blocks:
            x = step(model, block, x)
        return model.last(x)

    return habit


def after_blocks(end: Callable[[Any, Tensor], Any]) -> Habit:
    """Does something with what the blocks compute, without a connection over them."""
    return lambda model, inner, x: end(model, model.run(model.first(x)))


straight = outside(after_blocks(lambda model, x: model.last(x)))


def before(habit: Habit) -> Habit:
    """Does something with the first layer."""
    return lambda model, inner, x: model.last(model.run(habit(model, model.first, x)))


# State, hooks and control flow outside of the blocks. Ways out of refusals do the same in a block.


def prepare_book(module: Any) -> None:
    module.register_buffer("book", torch.zeros(WIDTH))


def keep_book(module: Any, inner: Inner, x: Tensor) -> Any:
    """A running mean of what a layer returns."""
    x = inner(x)
    y = x + module.book
    with torch.no_grad():
        module.book.copy_(0.9 * module.book + 0.1 * x.mean((0, 1)))
    return y


def reassign_book(module: Any, inner: Inner, x: Tensor) -> Any:
    module.book = 0.9 * module.book + 0.1 * x.detach().mean((0, 1))
    return inner(x + module.book)


def count(factor: Callable[[Any], Any]) -> Habit:
    """Counts its calls, and multiplies by what it makes of them."""

    def habit(module: Any, inner: Inner, x: Tensor) -> Any:
        module.steps += 1
        return inner(x) * factor(module.steps)

    return habit


warm_up = count(lambda steps: min(1.0, steps / 4))


def count_in_a_tensor(module: Any, inner: Inner, x: Tensor) -> Any:
    """A tensor that is not registered and that is written in place."""
    module.plain += 1
    return inner(x) * float(module.plain)


def remember(module: Any, inner: Inner, x: Tensor) -> Any:
    module.memory.append(x.detach().mean())
    return inner(x) + sum(module.memory)


GLOBAL = {"calls": 0}


def count_in_a_global(module: Any, inner: Inner, x: Tensor) -> Any:
    """A counter in a global of the user's file."""
    GLOBAL["calls"] += 1
    return inner(x) * GLOBAL["calls"]


def leave_out(drawn: Callable[[], Any]) -> Habit:
    """Leaves out blocks by random numbers, in the loop over them."""
    return by_blocks(lambda model, block, x: x if model.training and drawn() < 0.5 else x + block(x))


def pad(module: Any, inner: Inner, x: Tensor) -> Any:
    """Pads to a multiple of four."""
    missing = -x.shape[1] % 4
    return inner(F.pad(x, (0, 0, 0, missing)))[:, : x.shape[1]]


def leave_out_the_last(model: Any, inner: Inner, x: Tensor) -> Any:
    """Leaves out the last block for short sequences."""
    x = model.first(x)
    for block in model.blocks if x.shape[1] > 9 else list(model.blocks)[:-1]:
        x = block(x)
    return model.last(x)


def divide_by_samples(module: Any, inner: Inner, x: Tensor) -> Any:
    return inner(x) / (1 if x.shape[0] < 3 else x.shape[0])


decide_by_values = in_blocks.changed(lambda module, y: y * 2 if y.mean() > 0 else y)


def index(model: Any, inner: Inner, x: Tensor) -> Any:
    """Boolean indexing between blocks."""
    mask = x[:, :, 0] > 0
    flat = model.run(model.first(x[mask]))
    return model.last(torch.zeros_like(x).masked_scatter(mask[..., None], flat))


def exit_early(model: Any, inner: Inner, x: Tensor) -> Any:
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
        if x.abs().mean() < 0.1:
            break
    return model.last(x)


def observe_model(model: Any) -> None:
    """An observing hook on the whole model."""
    model.register_forward_hook(lambda module, inputs, output: model.seen.append(1))


def observe_blocks(model: Any) -> None:
    """Forward hooks that collect the blocks' outputs' means, as probes do."""
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: model.seen.append(output.detach().mean()))


def scale_gradient(module: Any, inner: Inner, x: Tensor) -> Any:
    """A hook on an activation."""
    y = inner(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.1)
    return y


def clamp_gradients(model: Any) -> None:
    """A hook on the parameter of a layer outside, that clamps large gradients only."""
    model.last.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.first.register_full_backward_hook(lambda _, inputs, __: None)


def leave_loss(block: Any, inner: Inner, x: Tensor) -> Tensor:
    """Leaves a loss in an attribute."""
    y: Tensor = inner(x)
    block.auxiliary = y.square().mean()
    return y


returning = in_blocks.does(in_blocks.changed(lambda block, y: (y, y.square().mean())))


def add_losses(model: Any, inner: Inner, x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks leave a loss in an attribute, which the model adds up."""
    y = inner(x)
    return y, torch.stack([block.auxiliary for block in model.blocks]).sum()


def add_returned_losses(model: Any, inner: Inner, x: Tensor) -> dict[str, Tensor]:
    early, total = model.first(x), x.new_zeros(())
    x = early
    for block in model.blocks:
        x, own = block(x)
        total = total + own
    return {"out": model.last(x + early), "auxiliary": total}


def keep_loss(module: Any, inner: Inner, x: Tensor) -> Any:
    """Keeps its last loss in an attribute for the user to read."""
    y = inner(x)
    module.latest = y.detach().square().mean()
    return y


def drop_norm(model: Any, x: Tensor) -> Any:
    """BatchNorm whose output is not used: its statistics move all the same."""
    model.side(x.transpose(1, 2))
    return model.last(x)


def drop_head(model: Any, inner: Inner, x: Tensor) -> Any:
    """An auxiliary head with BatchNorm, computed and dropped."""
    x = model.first(x)
    for number, block in enumerate(model.blocks):
        x = block(x)
        if number == 1:
            model.auxiliary(x)
    return model.last(x)


def checkpointed(reentrant: bool) -> Build:
    """Makes stacks with torch.utils.checkpoint around each block."""
    return outside(by_blocks(lambda model, block, x: checkpoint(block, x, use_reentrant=reentrant)))


def autocast(module: Any, inner: Inner, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return inner(x)


def autocast_to_float(module: Any, inner: Inner, x: Tensor) -> Any:
    return autocast(module, inner, x).float()


def freeze_trunk(model: Any, inner: Inner, x: Tensor) -> Any:
    """The first half runs under no_grad."""
    with torch.no_grad():
        x = modules.in_order(model.blocks[:2], model.first(x))
    return model.last(modules.in_order(model.blocks[2:], x))


def vmap(module: Any, inner: Inner, x: Tensor) -> Any:
    return torch.vmap(inner)(x)


def call_with_smaller_weights(module: Any, block: Any, x: Tensor) -> Any:
    """functional_call with weights that are computed."""
    return torch.func.functional_call(block, {name: weight * 0.9 for name, weight in block.named_parameters()}, (x,))


def switch_mode(model: Any, inner: Inner, x: Tensor) -> Any:
    """Its forward puts a frozen part in evaluation mode."""
    model.blocks[0].eval()
    return inner(x)


def average(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """A student and a teacher that the model's forward averages (BYOL)."""
    in_blocks.follow(model.teacher, model.student)
    with torch.no_grad():
        target = model.teacher(x)
    return model.student(x), target


def write_between(model: Any, block: nn.Module, x: Tensor) -> Tensor:
    """In-place operators between blocks, on what blocks have returned."""
    y: Tensor = block(x)
    y = y + x
    y.mul_(0.5)
    y[:, 0] += 1
    return y


def write_views(model: Any, inner: Inner, x: Tensor) -> Any:
    """Writes what its blocks return, which are views of their inputs."""
    x = model.first(x).clone()
    for block in model.blocks:
        view, y = block(x)
        view.add_(y)
    return model.last(x)


def make_constants(model: Any, inner: Inner, x: Tensor) -> Any:
    """Constants that are made anew in every forward, on the fly."""
    positions = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
    mask = torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=x.dtype))
    return inner(mask @ x / x.shape[1] + positions + torch.tensor(0.5, dtype=x.dtype))


def pack_all(model: Any, x: Tensor) -> Tensor:
    """Packed sequences between recurrent blocks."""

    def run(packed: Any) -> Any:
        for layer in model.layers:
            packed, _ = layer(packed)
        return packed

    return in_blocks.pack(x, run)


def nest(module: Any, inner: Inner, x: Tensor) -> Any:
    """A nested tensor between."""
    nested = torch.nested.as_nested_tensor(list(x.unbind(0)), layout=torch.jagged)
    return inner(nested).to_padded_tensor(0.0)


OUTSIDE: dict[str, Build] = {
    "BookOutside": outside(before(keep_book), prepare_book),
    "ReassignedOutside": outside(reassign_book, prepare_book),
    "CounterOutside": outside(warm_up, steps=0),
    "TensorCounterOutside": outside(
        count(lambda steps: 1 + steps), lambda model: model.register_buffer("steps", torch.zeros((), dtype=torch.long))
    ),
    "PlainTensorOutside": outside(count_in_a_tensor, plain=torch.zeros(())),
    "ListOutside": outside(remember, memory=[]),
    "GlobalOutside": outside(count_in_a_global, lambda model: GLOBAL.update(calls=0)),
    "ParityOutside": outside(in_blocks.parity),
    "LengthOutside": outside(pad, kind=in_blocks.Recurrent),
    "LongerIsDeeper": outside(leave_out_the_last),
    "BatchOutside": outside(divide_by_samples),
    "ValuesOutside": outside(decide_by_values),
    "ItemOutside": outside(lambda model, inner, x: inner(x) * max(x.abs().max().item(), 1.0)),
    "IndexedOutside": outside(index),
    "EarlyExit": outside(exit_early),
    "HookedOutside": outside(prepare=observe_model, seen=[]),
    "ObservedBlocks": outside(prepare=observe_blocks, seen=[]),
    "ReversalOutside": outside(
        after_blocks(lambda model, x: (model.last(x), model.domain(in_blocks.reverse(x)))),
        adds(domain=lambda: nn.Linear(WIDTH, 2)),
    ),
    "StraightThroughOutside": outside(in_blocks.changed(lambda model, y: y + (y.round() - y).detach())),
    "ScaledGradientOutside": outside(before(scale_gradient)),
    "ClampedOutside": outside(prepare=clamp_gradients),
    "AuxiliaryAttribute": outside(add_losses, kind=in_blocks.does(leave_loss, auxiliary=None)),
    "AuxiliaryReturned": outside(add_returned_losses, kind=returning),
    "LossInside": outside(keep_loss, latest=None),
    "UnusedNorm": outside(after_blocks(drop_norm), adds(side=lambda: nn.BatchNorm1d(WIDTH))),
    "UnusedHead": outside(
        drop_head, adds(auxiliary=lambda: nn.Sequential(linear(), BatchNormed(), nn.Linear(WIDTH, 2)))
    ),
    "CheckpointedBlocks": checkpointed(reentrant=False),
    "CheckpointedSequential": holds(
        lambda model, x: checkpoint_sequential(model.blocks, 2, model.first(x), use_reentrant=False),
        first=linear,
        blocks=modules.sequence(Block),
    ),
    "AutocastOutside": outside(autocast_to_float),
    "NoGradTrunk": outside(freeze_trunk),
    "VmappedOutside": outside(vmap),
    "FunctionalOutside": outside(by_blocks(call_with_smaller_weights)),
    "SwitchedMode": outside(switch_mode, kind=BatchNormed),
    "Momentum": holds(average, student=Stack, teacher=lambda: Stack().requires_grad_(False)),
    "InputWritten": outside(lambda model, inner, x: inner(x.mul_(0.5))),
    "InPlaceBetween": outside(by_blocks(write_between)),
    "ViewsBetween": outside(
        write_views,
        kind=in_blocks.does(lambda block, inner, x: (x[:, 1:], inner(x)[:, 1:].detach().clone() * block.linear.bias)),
    ),
    "Captum": outside(make_constants),
    "PadAndPack": holds(pack_all, layers=many(partial(nn.GRU, WIDTH, WIDTH, batch_first=True), 3)),
    "Jagged": outside(nest),
}
DRAWING: dict[str, Build] = {
    "RandomOutside": outside(lambda model, inner, x: inner(x) * random.random()),
    "LayerDrop": outside(leave_out(random.random)),
    "TorchLayerDrop": outside(leave_out(lambda: torch.rand([]))),
}

# How blocks are held


class Words(nn.Module):
    """An embedding, blocks, and what is done after them; the embedding may be tied to a head."""

    def __init__(
        self, end: Callable[[Any, Tensor], Any], embedding: nn.Module, blocks: int = 4, head: str = ""
    ) -> None:
        super().__init__()
        self.embedding, self._end = embedding, end
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        if head:
            self.head = nn.Linear(WIDTH, 20, bias=False)
        if head == "tied":
            self.head.weight = embedding.weight  # type: ignore[assignment]

    def forward(self, tokens: Tensor) -> Any:
        return self._end(self, modules.in_order(self.blocks, self.embedding(tokens)))


def repeat(model: Any, inner: Inner, x: Tensor) -> Any:
    """Blocks in turn, several times: ALBERT with one, a universal transformer with two."""
    x = model.first(x)
    for _ in range(model.times):
        x = model.run(x)
    return model.last(x)


def unroll(model: Any, inner: Inner, x: Tensor) -> Any:
    """As many passes as there are letters."""
    h = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        for block in model.blocks:
            h = block(h + x[:, t])
    return model.last(h)


def run_lists(model: Any, x: Tensor) -> Tensor:
    """Lucidrains: ModuleList([ModuleList([norm, attention, norm, mlp]), ...])."""
    for norm, attention, other, mlp in model.layers:
        x = attention(norm(x)) + x
        x = mlp(other(x)) + x
    return x


def run_parallel_lists(model: Any, x: Tensor) -> Tensor:
    """attentions[i] and mlps[i]."""
    for attention, mlp in zip(model.attentions, model.mlps, strict=True):
        x = mlp(attention(x)) + x
    return x


def apply_weights(model: Any, x: Tensor) -> Tensor:
    """No modules at all: a list of weights, or one tensor of all layers' weights."""
    for each in model.weights:
        x = torch.tanh(x @ each) + x
    return x


def run_attributes(model: Any, x: Tensor) -> Tensor:
    for number in range(4):
        x = getattr(model, f"layer{number}")(x)
    return x


def run_named(model: Any, x: Tensor) -> Tensor:
    for name in model.order:
        x = model.blocks[name](x)
    return x


def skip(model: Any, x: Tensor) -> Tensor:
    """Down, up, and skips between."""
    kept = []
    for block in model.down:
        x = block(x)
        kept.append(x)
    for block in model.up:
        x = block(torch.cat([x, kept.pop()], -1)).tanh()
    return x


def read_all_before(model: Any, inner: Inner, x: Tensor) -> Any:
    """Every block reads all before it."""
    seen = [model.first(x)]
    for block in model.blocks:
        seen.append(block(torch.stack(seen).sum(0)))
    return model.last(torch.stack(seen).mean(0))


def call_forwards(model: Any, inner: Inner, x: Tensor) -> Any:
    """Functions in attributes, and blocks that are called by another method."""
    x = model.activation(model.first(x))
    for block in model.blocks:
        x = block.forward(x)
    return model.last(x)


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = linear(), linear()

    def encode(self, x: Tensor) -> Tensor:
        return self.there(x).tanh()

    def decode(self, x: Tensor) -> Tensor:
        return self.back(x).tanh()


def run_other_methods(model: Any, x: Tensor) -> Tensor:
    """Blocks with methods encode and decode."""
    for block in model.blocks:
        x = block.encode(x)
    for block in model.blocks:
        x = block.decode(x)
    return x


def generate(model: Any, inner: Inner, x: Tensor) -> Any:
    """A generator over blocks, and a comprehension."""

    def outputs(x: Tensor) -> Iterator[Tensor]:
        for block in model.blocks:
            x = block(x)
            yield x

    return model.last(torch.stack(list(outputs(model.first(x)))).mean(0))


def run_complex(model: Any, x: Tensor) -> Tensor:
    """Complex numbers travel between blocks."""
    z = modules.in_order(model.blocks, torch.complex(x, torch.zeros_like(x)))
    return torch.view_as_real(z).flatten(-2)


def multiply_complex(block: Any, z: Tensor) -> Tensor:
    a, b = block.real(z.real) - block.imaginary(z.imag), block.real(z.imag) + block.imaginary(z.real)
    return z + torch.complex(a.tanh(), b)


def norm_attention_and_mlp() -> nn.Module:
    return nn.ModuleList([nn.LayerNorm(WIDTH), KINDS["Attention"](), nn.LayerNorm(WIDTH), Block()])


HELD: dict[str, Build] = {
    "SharedBlock": outside(repeat, blocks=1, times=4),
    "CyclicBlocks": outside(repeat, blocks=2, times=2),
    "Unrolled": outside(unroll, blocks=2),
    "ListsInAList": holds(run_lists, layers=many(norm_attention_and_mlp, 6)),
    "ParallelLists": holds(run_parallel_lists, attentions=many(KINDS["Attention"]), mlps=many(Block)),
    "ParameterListModel": holds(
        apply_weights, weights=lambda: nn.ParameterList(torch.randn(WIDTH, WIDTH) / 2 for _ in range(4))
    ),
    "StackedWeights": holds(apply_weights, weights=modules.weight(4, WIDTH, WIDTH, over=2)),
    "Attributes": holds(run_attributes, layer0=Block, layer1=Block, layer2=Block, layer3=Block),
    "NamedBlocks": holds(
        run_named,
        blocks=lambda: nn.ModuleDict({f"block {number}": Block() for number in range(4)}),
        order=lambda: [f"block {number}" for number in (2, 0, 3, 1)],
    ),
    "UnetSkips": holds(skip, down=many(Block, 3), up=many(lambda: nn.Linear(2 * WIDTH, WIDTH), 3)),
    "Dense": outside(read_all_before),
    "Nested": holds(lambda model, x: model.module(x), module=holds(lambda model, x: model.inner(x), inner=Stack)),
    "Lambdas": outside(call_forwards, activation=F.gelu),
    "OtherMethod": holds(run_other_methods, blocks=many(Coder, 3)),
    "GeneratedBlocks": outside(generate),
    "ComplexBlocks": holds(run_complex, blocks=many(holds(multiply_complex, real=linear, imaginary=linear))),
    "ComplexParameter": partial(
        modules.InOrder,
        holds(
            lambda block, x: (x * block.phase).real + x,
            phase=lambda: nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128)),
        ),
    ),
}


BLOCKS = ("EmaBook", "Counter", "GradientMask", "Routed", "Parity")
SEQUENTIAL: dict[str, Build] = {
    "nn.Sequential": modules.sequence(Block),
    **{f"nn.Sequential of {name}": modules.sequence(KINDS[name]) for name in BLOCKS},
}

# What goes in and out

half = partial(Stack, blocks=2)
two_towers = holds(lambda model, x, y: model.left(x) * model.right(y), left=half, right=half)


class Pair(NamedTuple):
    out: Tensor
    hidden: Tensor


@dataclasses.dataclass
class Result:
    out: Tensor
    hidden: Tensor
    name: str = "result"


RETURNS: dict[str, Callable[[Any, Tensor], Any]] = {
    "a tuple": lambda model, x: (model.last(x), x),
    "a dict": lambda model, x: {"out": model.last(x), "hidden": x, "name": "x"},
    "a named tuple": lambda model, x: Pair(model.last(x), x),
    "a dataclass": lambda model, x: Result(model.last(x), x),
    "None and numbers": lambda model, x: (model.last(x), None, 3, [x]),
}


def pass_masks(model: Any, inner: Inner, x: Tensor, padding: Tensor) -> Any:
    """An attention mask made of a padding mask, given to every block."""
    x = model.first(x)
    for block in model.blocks:
        x = block(x, src_key_padding_mask=padding)
    return model.last(x)


def shift(model: Any, inner: Inner, batch: dict[str, Any]) -> Any:
    """A dict of inputs with a nested tuple."""
    x, (shift, _) = batch["x"], batch["rest"]
    return inner(x + shift)


layer = partial(nn.TransformerEncoderLayer, WIDTH, 2, 12, dropout=0.0, batch_first=True)
masked = outside(pass_masks, kind=layer)
padded = arguments(normal(LENGTH, WIDTH), lambda samples, length: torch.arange(length).expand(samples, -1) > length - 3)
dated = keywords(x=normal(LENGTH, WIDTH), rest=arguments(normal(1, 1), lambda samples, length: torch.ones(())))

# What is trained


def frozen(*names: str) -> Build:
    """Makes stacks of which some parts are not trained."""
    return outside(prepare=lambda model: [model.get_submodule(name).requires_grad_(False) for name in names])


class FrozenNorm(Stack):
    """Frozen BatchNorm: evaluation mode inside of a model that trains; the loop calls train() before."""

    def __init__(self) -> None:
        super().__init__(BatchNormed)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        for block in self.blocks[:2]:
            block.norm.eval()
        return self


# What users change between steps

Change = Callable[[Any, int], Any]
"""What is done with a model before a step, which is given by its number."""


def once(change: Callable[[Any], Any]) -> Change:
    """Before the second step."""
    return lambda model, step: change(model) if step == 1 else None


def blocks_of(model: Any) -> Any:
    return model if isinstance(model, nn.Sequential) else model.blocks


def of_norms(change: Callable[[nn.BatchNorm1d, int], Any]) -> Change:
    def changed(model: Any, step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                change(module, step)

    return changed


def replace_data(model: Any) -> None:
    weight = blocks_of(model)[1].linear.weight
    weight.data = weight.data * 0.5


def replace_parameter(model: Any) -> None:
    linear = model.blocks[1].linear
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)


def replace_block(model: Any) -> None:
    torch.manual_seed(3)
    model.blocks[1] = Block().double()


def write_in_place(model: Any, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def load(model: Any) -> None:
    torch.manual_seed(3)
    model.load_state_dict({name: torch.randn_like(value) / 3 for name, value in model.state_dict().items()})


def heat_blocks(model: Any, step: int) -> None:
    for block in model.blocks:
        block.temperature = 1.0 + step


def freeze(model: Any) -> None:
    blocks_of(model)[0].requires_grad_(False)


def unfreeze(model: Any, step: int) -> None:
    model.blocks[0].requires_grad_(step > 0)


def halve_output(module: nn.Module) -> None:
    module.register_forward_hook(lambda _, __, output: output * 0.5)


def cool(module: Any, inner: Inner, x: Tensor) -> Any:
    return inner(x) / module.temperature


normed = partial(Stack, BatchNormed)
three = modules.sequence(Block, 3)
CHANGES: dict[str, tuple[Build, Change]] = {
    "load_state_dict": (Stack, once(load)),
    "writes in place": (Stack, write_in_place),
    "bias.data.add_": (Stack, lambda model, step: model.blocks[1].linear.bias.data.add_(0.1 * step)),
    "requires_grad_(False)": (Stack, once(freeze)),
    "requires_grad_(True)": (Stack, unfreeze),
    "bn.eval()": (normed, of_norms(lambda norm, step: norm.eval() if step == 1 else None)),
    "bn.momentum": (normed, of_norms(lambda norm, step: setattr(norm, "momentum", 0.1 / (step + 1)))),
    "p.data = ...": (Stack, once(replace_data)),
    "a new nn.Parameter": (Stack, once(replace_parameter)),
    "a new buffer": (
        partial(Stack, EmaBook),
        once(lambda model: setattr(model.blocks[1], "book", torch.ones(WIDTH, dtype=torch.float64))),
    ),
    "a new block": (Stack, once(replace_block)),
    "block.temperature": (partial(Stack, in_blocks.does(cool, temperature=1.0)), heat_blocks),
    "model.temperature": (
        outside(cool, temperature=1.0),
        lambda model, step: setattr(model, "temperature", 1.0 + step),
    ),
    "register_hook": (
        Stack,
        once(lambda model: model.blocks[1].linear.weight.register_hook(lambda gradient: gradient * 0.1)),
    ),
    "a hook on a block": (Stack, once(lambda model: halve_output(model.blocks[1]))),
    "a hook on the model": (Stack, once(halve_output)),
    "model.eval()": (normed, lambda model, step: model.train(step != 1)),
    "nn.Sequential, p.data = ...": (three, once(replace_data)),
    "nn.Sequential, requires_grad_(False)": (three, once(freeze)),
}

# torch.nn

vectors = arguments(normal(LENGTH, 8))


two_vectors = arguments(normal(LENGTH, 8), lambda samples, length: torch.randn(samples, length - 2, 8))
transformer = partial(nn.Transformer, 8, 2, 2, 2, 16, dropout=0.0, batch_first=True)


def encode_causally(model: Any, x: Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return model.encoder(x, mask=mask, is_causal=model.causal)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def cases(family: str, models: Mapping[str, Build], inputs: Draw = draw, **options: Any) -> list[Case]:
    return [Case(name, family, build, inputs, **options) for name, build in models.items()]


WORDS: dict[str, Build] = {
    "TiedWords": lambda: Words(lambda model, x: model.head(x), nn.Embedding(20, WIDTH), head="tied"),
    "TiedByFunction": lambda: Words(lambda model, x: F.linear(x, model.embedding.weight), nn.Embedding(20, WIDTH)),
    "Bags": lambda: Words(lambda model, x: x, nn.EmbeddingBag(20, WIDTH), blocks=3),
    # A sparse embedding has sparse gradients.
    "SparseWords": lambda: Words(lambda model, x: model.head(x), nn.Embedding(20, WIDTH, sparse=True), head="own"),
    "SparseSingle": lambda: Words(lambda model, x: x, nn.Embedding(20, WIDTH, sparse=True), head="own"),
}
TRAINED: dict[str, Build] = {
    "frozen beginning": frozen("first", "blocks.0"),
    "frozen end": frozen("blocks.2", "blocks.3", "last"),
    "frozen BatchNorm": FrozenNorm,
    "unused parameters": outside(prepare=adds(spare=linear)),
}
TORCH: dict[str, Build] = {
    "nn.Transformer": transformer,
    "nn.Transformer, norm first": partial(transformer, norm_first=True),
}
ENCODERS: dict[str, Build] = {
    "nn.TransformerEncoder, causal mask": holds(encode_causally, encoder=encoder, causal=lambda: None),
    "nn.TransformerEncoder, is_causal": holds(encode_causally, encoder=encoder, causal=lambda: True),
}
BOTH: dict[str, Build] = {
    "Dropping, RandomDepth": partial(Stack, lambda: nn.Sequential(KINDS["Dropping"](), KINDS["RandomDepth"]()))
}
CASES: tuple[Case, ...] = (
    *cases("outside of blocks", OUTSIDE),
    Case("CheckpointedBlocks, reentrant", "outside of blocks", checkpointed(reentrant=True), draw),
    *cases("outside of blocks", DRAWING, microbatches=1, draws=True),
    *cases("how blocks are held", HELD),
    *cases("how blocks are held", WORDS, words),
    *cases("how blocks are held", SEQUENTIAL),
    Case("TwoTowers", "inputs and outputs", two_towers, arguments(normal(LENGTH, WIDTH), normal(LENGTH, WIDTH))),
    Case("Masks", "inputs and outputs", masked, padded),
    Case("a nested dict", "inputs and outputs", outside(shift), arguments(dated)),
    *cases("inputs and outputs", {name: outside(after_blocks(end)) for name, end in RETURNS.items()}),
    *cases("what is trained", TRAINED),
    *(Case(name, "changes between steps", build, draw, between=between) for name, (build, between) in CHANGES.items()),
    *cases("torch.nn", TORCH, two_vectors),
    *cases("torch.nn", ENCODERS, vectors),
    *cases("random numbers in blocks", BOTH, microbatches=1, draws=True),
)
