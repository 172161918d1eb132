"""Tracing a model with its blocks opaque: only the glue between blocks is traced.

While the model is traced, each block's forward is replaced by one operator, ``penstock::block``, of which the tracer
sees only the sizes of its results. These are known from runs of the model. In the layers that are cut from the trace,
the operator is a call of the user's own module again, as the Python that it is.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations_with_replacement
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.library import Library

from penstock.capturing.export.block_calls import BlockCall, ResultTensor, Sizes
from penstock.capturing.export.model_runs import ModelRun
from penstock.capturing.export.openings import NAME as OPENING
from penstock.capturing.export.openings import Opening, TracedOpening
from penstock.capturing.export.watched_runs import is_inside, leaky
from penstock.capturing.module_copies import Anew, Copies
from penstock.capturing.module_state import is_plain
from penstock.capturing.samples import flatten
from penstock.capturing.sequential import EagerLayer, Flag, Form, Maybe
from penstock.errors import CaptureError
from penstock.torch_internals.export import is_data_dependent
from penstock.torch_internals.hidden_modules import HiddenModules
from penstock.torch_internals.modules import hooks_of, replaced_forward
from penstock.torch_internals.pytrees import tree_unflatten

_LIBRARY = Library("penstock", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("block(Tensor[] tensors, SymInt[] numbers, int call) -> Tensor[]")  # type: ignore[no-untyped-call]


class Untraceable(CaptureError):
    """Code of the model cannot be traced. It follows this number of `calls` of blocks; None: all that were made."""

    def __init__(self, calls: int | None, text: str) -> None:
        super().__init__(text)
        self.calls = calls


class UnknownSize(CaptureError):
    """The sizes of what a block returns do not follow from those of its arguments."""


@dataclass(frozen=True, slots=True, eq=False)
class TracedCall:
    """One call of a block in the trace."""

    path: str
    takes: Form
    returns: Form
    recorded: BlockCall
    unrecorded: Mapping[int, Any]
    """Leaves of the arguments that are tensors in the trace only; in the runs they are this constant."""
    gradients: bool = True
    """Whether it is called with gradients, and not under `torch.no_grad`."""

    def tensor_leaves(self) -> list[int]:
        """The leaves of the arguments that are tensors in the trace."""
        return [index for index, constant in enumerate(self.takes.constants) if constant in (Tensor, Flag, Maybe)]

    def recorded_tensors(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The `tensors` of a call in the trace without those that the runs do not pass."""
        return [each for index, each in zip(self.tensor_leaves(), tensors, strict=True) if index not in self.unrecorded]

    def with_recorded(self, leaves: Collection[int]) -> "TracedCall":
        """The call with the constants of the runs at `leaves`."""
        constants = enumerate(self.takes.constants)
        own = tuple(self.unrecorded[index] if index in leaves else constant for index, constant in constants)
        return replace(self, takes=Form(self.takes.structure, own), unrecorded={})


@dataclass(slots=True, eq=False)
class OpaqueBlocks:
    """The blocks of a model that are not traced, by path, and their calls in the trace."""

    calls: Mapping[str, Sequence[BlockCall]]
    model: nn.Module
    first: str | None = None
    """The block that the opening of the model ends with, if one is to run as it is."""
    later: Collection[str] = ()
    """That block, and those that are called after it only."""
    opening: TracedOpening | None = None
    """In the present trace."""
    thread: int = field(default_factory=get_ident)
    threaded: bool = False
    """Whether one was called in another thread than the trace is made in."""
    copies: Copies | None = None
    """Of the model, of which one is traced now."""
    hidden: HiddenModules | None = None
    """What the tracer sees nothing of, while it is hidden."""
    traced: list[TracedCall] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def layer(self, call: int) -> EagerLayer:
        """The block that `call` calls, between tensors."""
        found = self.traced[call]
        body = self.model.get_submodule(found.path)
        if not found.path:
            assert self.opening is not None and self.copies is not None and self.first is not None, "it was traced"
            read = {id(self.copies.own(each)) for each in self.opening.tensors()}
            tensors = {index for index, constant in enumerate(found.returns.constants) if constant is Tensor}
            body = Opening(self.model, self.first, self.later, read, tensors)
        return EagerLayer(
            found.path or OPENING,
            body,
            found.takes,
            found.returns,
            gradients=found.gradients,
            by_forward=found.recorded.by_forward,
        )

    def result_name(self, call: int, index: int) -> str:
        """The name of one of the tensors that a call returns, such as ``layers.0`` or ``layers.0@1[2]``."""
        several = self.traced[call].returns.tensor_count > 1
        return f"{self.call_name(call)}{f'[{index}]' if several else ''}"

    def call_name(self, call: int) -> str:
        """The name of a call, such as ``layers.0`` or ``layers.0@1``."""
        path = self.traced[call].path
        before = sum(other.path == path for other in self.traced[:call]) % len(self.calls[path])
        return f"{path or OPENING}{f'@{before}' if before else ''}"

    def enter(self, path: str, args: Any, kwargs: Any) -> Any:
        """Stands for the call of a block in the trace."""
        recorded = self.calls[path]
        if not recorded:
            raise CaptureError(
                f"block {path} is called in a trace and not in a run on the sample: expected the same calls. Call it "
                "in both, or pass the model as a list of layers"
            )
        found = recorded[self._counts[path] % len(recorded)]
        self._counts[path] += 1
        if get_ident() != self.thread:
            self.threaded = True
            raise RuntimeError("a block is called in another thread than the model")
        if path == self.first and self.opening is not None and not self.opening.returned:
            args, kwargs = self.opening.end((args, kwargs), lambda call: self.enter("", *call))
        leaves, structure = flatten((args, kwargs))
        if self.opening is not None:
            leaves = list(map(self.opening.stand_in, leaves))
        assert self.copies is not None, "copies are traced"
        leaves = list(map(self.copies.own, leaves))
        flags = {
            index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.SymBool) and is_data_dependent(leaf)
        }
        # What the block decides by values it is given as a tensor. Decisions by sizes hold for those that decide alike.
        leaves = [
            _as_tensor(leaf) if index in flags else bool(leaf) if isinstance(leaf, torch.SymBool) else leaf
            for index, leaf in enumerate(leaves)
        ]
        unrecorded = _unrecorded(leaves, found, path, flags)
        constants = enumerate(self._constant(path, *each) for each in zip(leaves, found.lasting, strict=True))
        takes = Form(structure, tuple(Flag if index in flags else constant for index, constant in constants))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
        call = len(self.traced)
        self.traced.append(TracedCall(path, takes, Form(found.structure, ()), found, unrecorded))
        known = _Sizes(self, call, tensors, numbers)
        leaves = [known.of(leaf) if isinstance(leaf, tuple) else leaf for leaf in found.leaves]
        returned = Form(found.structure, tuple(map(_returned, leaves)))
        self.traced[call] = replace(self.traced[call], returns=returned)
        # With the whole numbers that follow from sizes, which the block must return.
        numbers += [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
        results = iter(torch.ops.penstock.block(tensors, numbers, call))
        leaves = [next(results) if isinstance(leaf, ResultTensor) else leaf for leaf in leaves]
        return tree_unflatten(leaves, found.structure)

    def _constant(self, path: str, leaf: Any, lasting: bool) -> Any:
        if isinstance(leaf, Tensor):
            return Maybe if self.opening is not None and id(leaf) in self.opening.returned else Tensor
        made = None if self.opening is None or lasting else self.opening.objects.get(id(leaf))
        return made or _constant(path, leaf, lasting)


TRACING: list[OpaqueBlocks] = []
"""The blocks of the model that is being traced now."""


@contextmanager
def opaque(blocks: OpaqueBlocks, copies: Copies, *, hide: bool) -> Iterator[None]:
    """Replaces the forwards of the `copies` of `blocks` for its body. Their hooks are part of them and are not traced
    either.

    `hide`: whether their weights are hidden, too. Code outside of a block that uses one raises `UsedHidden`.
    """
    with ExitStack() as stack:
        paths = list(filter(None, blocks.calls))
        modules = [copies.of(blocks.model.get_submodule(path)) for path in paths]
        blocks.copies = copies
        for path, module in zip(paths, modules, strict=True):
            stack.enter_context(replaced_forward(module, _stand_in(blocks, path)))
        blocks.hidden = HiddenModules(modules) if hide else None
        if blocks.hidden is not None:
            stack.enter_context(blocks.hidden.hidden())
        TRACING.append(blocks)
        try:
            yield
        finally:
            TRACING.pop()


def is_block(node: Node) -> bool:
    """Whether `node` of a trace is the call of a block."""
    return node.target is torch.ops.penstock.block.default


def call_of(node: Node) -> tuple[int, tuple[Node | int, ...]]:
    """The number of the call of a block, and its arguments. A size that the trace has fixed is a number."""
    tensors, numbers, call = cast("tuple[Sequence[Node], Sequence[Node | int], int]", node.args)
    return call, (*tensors, *numbers)


def calls_before(node: Node) -> int:
    """How many calls of blocks were made in the trace of `node` before it."""
    while not is_block(node) and node.op != "root":
        node = node.prev
    return call_of(node)[0] + 1 if is_block(node) else 0


def _stand_in(blocks: OpaqueBlocks, path: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return blocks.enter(path, args, kwargs)

    return forward


def _returned(leaf: Any) -> Any:
    """What the form of a block's results has for `leaf`, of which a size that may change is known in the trace."""
    if isinstance(leaf, ResultTensor | torch.SymInt):
        return Tensor if isinstance(leaf, ResultTensor) else torch.SymInt
    return leaf if is_plain(leaf) else object


def _as_tensor(flag: torch.SymBool) -> Tensor:
    return torch.scalar_tensor(torch.sym_ite(flag, 1, 0), dtype=torch.bool)  # type: ignore[no-untyped-call]


def _unrecorded(leaves: Sequence[Any], found: BlockCall, path: str, flags: Collection[int]) -> dict[int, Any]:
    """Leaves of the arguments that are tensors in the trace, and plain constants in all runs; or flags.

    Models leave a mask out where they can see that it hides nothing, which they cannot in a trace.
    """
    pairs = list(zip(leaves, found.objects, strict=False))
    if len(leaves) != len(found.objects) or any(its is Tensor and not isinstance(leaf, Tensor) for leaf, its in pairs):
        raise CaptureError(
            f"block {path} is called with other arguments in a trace than in a run: {_described(leaves)} instead of "
            f"{_described(found.objects)}. Call it in one way, or pass the model as a list of layers"
        )
    odd = {index: its for index, (leaf, its) in enumerate(pairs) if isinstance(leaf, Tensor) and its is not Tensor}
    for index, its in odd.items():
        if index not in flags and not (is_plain(its) and found.lasting[index]):
            raise CaptureError(
                f"block {path} is called with a tensor in a trace where it is called with {its!r} in a run, at leaf "
                f"{index} of its arguments. Call it in one way, or pass the model as a list of layers"
            )
    return odd


def _described(leaves: Iterable[Any]) -> str:
    return ", ".join("a tensor" if leaf is Tensor or isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)


def _constant(path: str, leaf: Any, lasting: bool) -> Any:
    if isinstance(leaf, torch.SymInt):
        return torch.SymInt
    if lasting or is_plain(leaf):
        return leaf
    try:
        return Anew(leaf)
    except Exception as error:
        raise CaptureError(
            f"block {path} is called with a {type(leaf).__name__} that cannot be copied for every call "
            f"({type(error).__name__}), as one with tensors in it that the code between blocks has computed. Expected "
            "tensors, constants, or an object without tensors other than a number, as torch.tensor(8). Make it in each "
            "block, pass the tensors in it (for a cache of transformers: use_cache=False in sample=), or pass the "
            "model as a list of layers"
        ) from error


@torch.library.impl(_LIBRARY, "block", "CompositeExplicitAutograd")
def _never(tensors: Sequence[Tensor], numbers: Sequence[int], call: int) -> list[Tensor]:
    raise AssertionError("the operator stands for a block in a trace and is never run")


@torch.library.register_fake("penstock::block", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _results(tensors: Sequence[Tensor], numbers: Sequence[Any], call: int) -> list[Tensor]:
    traced = TRACING[-1].traced[call]
    known, made = _Sizes(TRACING[-1], call, tensors, numbers), []
    for leaf in traced.recorded.leaves:
        if isinstance(leaf, ResultTensor):
            sizes = [known.of(size) for size in leaf.sizes]
            memory = torch.empty([sizes[d] for d in leaf.order], dtype=leaf.dtype, device=leaf.device)
            plain = leaf.order == tuple(range(len(sizes)))
            made.append(memory if plain else memory.permute([leaf.order.index(d) for d in range(len(sizes))]))
    return made


class _Sizes:
    """The sizes in the trace that the sizes in the arguments of `call` have become.

    No run shows what follows from one that is free in the trace and the same in all runs, as where a model fills up its
    batch to a multiple of something. It must be fixed.
    """

    def __init__(self, blocks: OpaqueBlocks, number: int, tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        call = blocks.traced[number]
        self.path = call.path
        self.free: dict[Sizes, Any] = {}
        """Those that differ between the runs."""
        for dimensions, tensor in zip(call.recorded.arguments, call.recorded_tensors(tensors), strict=True):
            shape = tensor.shape
            for index, each in enumerate(dimensions):
                self._note(each, shape[index])
        recorded, traced = iter(call.recorded.numbers), iter(numbers)
        for constant, its in zip(call.takes.constants, call.recorded.objects, strict=True):
            found = next(recorded) if type(its) is int else None
            # Numbers that do not follow from sizes are constants of the trace.
            size = next(traced) if constant is torch.SymInt else None
            if found is not None and size is not None:
                self._note(found, size)

    def _note(self, recorded: Sizes, traced: Any) -> None:
        if len(set(recorded)) > 1:
            self.free.setdefault(recorded, traced)
        elif isinstance(traced, torch.SymInt) and not is_data_dependent(traced):
            if not (traced.node.expr.is_symbol or traced.node.expr.is_number):
                raise UnknownSize(
                    f"block {self.path} is called with a size of {recorded[0]}, which follows from a size of the "
                    "model's inputs and did not change with it. Make it inside of the block, or pass the model as a "
                    "list of layers"
                )
            int(traced)

    def of(self, size: Sizes) -> Any:
        """What `size`, of which the value in each run is known, is in the trace."""
        if len(set(size)) == 1:
            return size[0]
        if size in self.free:
            return self.free[size]
        for each, found in self.free.items():
            # A multiple of it, or a part of it.
            if factor := _quotient(size, each):
                return found * factor
            if factor := _quotient(each, size):
                return found // factor
            # A constant more or less.
            if len(steps := {mine - its for mine, its in zip(size, each, strict=True)}) == 1:
                return found + steps.pop()
        for one, other in combinations_with_replacement(self.free, 2):
            if size == tuple(a * b for a, b in zip(one, other, strict=True)):
                return self.free[one] * self.free[other]
        raise UnknownSize(
            f"block {self.path} returns a tensor with a size of {' or '.join(map(str, size))}, which does not follow "
            "from the sizes of its arguments by a factor, a product or a difference. Compute what reads it inside of "
            "the block, or pass the model as a list of layers"
        )


def _quotient(sizes: Sizes, divisors: Sizes) -> int | None:
    """The whole number that all `sizes` are of their `divisors`; None if there is none."""
    pairs = list(zip(sizes, divisors, strict=True))
    if any(not divisor or size % divisor for size, divisor in pairs):
        return None
    found = {size // divisor for size, divisor in pairs}
    return found.pop() if len(found) == 1 else None


def opaque_paths(model: nn.Module, run: ModelRun) -> tuple[str, ...]:
    """The paths of the blocks of `run` that are called as they are.

    A block without parameters, state and hooks, such as a table of positions, is traced: what it computes can be
    computed again in any stage, so that it need not be sent. So is a block that a tensor escapes from, and one that
    reads parameters of another module: a trace shows which, and the block's stage trains what it holds. Raises
    `CaptureError` for what happens outside of these blocks and is no operator on tensors: a trace would lose it.
    """
    paths = []
    for path in sorted(run.blocks):
        if not path or leaky(path, run.escapes) or path in run.borrowing:
            continue
        module = model.get_submodule(path)
        noted = (*run.changed, *run.written, *run.drawing, *run.drawing_elsewhere)
        state = any(is_inside(each, path) for each in noted)
        hooked = any(map(hooks_of, module.modules()))
        if state or hooked or any(True for _ in module.parameters()):
            paths.append(path)
    _refuse_outside(model, paths, run)
    return tuple(paths)


def _refuse_outside(model: nn.Module, paths: Sequence[str], run: ModelRun) -> None:
    blocks = f"{', '.join(paths[:3]) or 'none'}{' and so on' if len(paths) > 3 else ''}"
    for place, found, fix in _only_in_blocks(model, run):
        if not any(is_inside(place, path) for path in paths):
            raise CaptureError(
                f"{type(model).__name__}: {found}. Only blocks run as the Python that they are; the code between them "
                f"is traced. Blocks are {blocks}. {fix}"
            )


def _only_in_blocks(model: nn.Module, run: ModelRun) -> Iterator[tuple[str, str, str]]:
    """What `model` holds or does that a trace would lose: the path, a description, and a way out."""
    buffers = {path for path, _ in model.named_buffers(remove_duplicate=False)}
    for attribute in sorted({*run.changed, *(run.written - buffers)}):
        yield (
            attribute,
            f"its forward changes {attribute}, which is outside of its blocks and would be lost",
            "Move what changes it into a block, with its state in attributes of the block",
        )
    for writer, parameter in sorted(run.writes):
        yield (
            writer,
            f"the forward of {writer or 'the model'} writes the parameter {parameter} outside of its blocks, which "
            "would be lost",
            "Write it in a block that holds it",
        )
    for path in sorted(run.drawing_elsewhere):
        yield (
            path,
            f"the forward of {path or 'the model'} draws random numbers of Python's random or of NumPy outside of its "
            "blocks, which would be the same in every step",
            "Draw them with torch.rand, or in a block",
        )
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield (
                path,
                f"{path or 'the model'} is a program of torch.jit and not inside of a block, so that it cannot be "
                "traced and is no module that can be called in its place",
                "Put it in a module of Python: self.inner = torch.jit.script(...) there, and return self.inner(x) in "
                "its forward",
            )
        if hooks := hooks_of(module):
            yield (
                path,
                f"{path or 'the model'} has the hook {getattr(hooks[0], '__qualname__', hooks[0])!r} and is not a "
                "block, so that the hook would not be run in steps",
                "Register it on a block, or remove it",
            )
