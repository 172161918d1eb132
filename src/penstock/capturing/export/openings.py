"""The opening of a model: its code up to the first call of one of its blocks, as one block that is not traced.

What looks at values or counts samples in Python, such as a loop over images or a search for their places, often stands
before the layers of a language model. It runs as it is: a call of the whole model, which ends where the first of these
layers would run. What this layer would be given is what the opening returns.
"""

import dis
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from inspect import currentframe
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.capturing.module_copies import Anew
from penstock.capturing.module_state import is_plain
from penstock.capturing.operators import TensorNotes, tensors_in
from penstock.capturing.samples import flatten
from penstock.errors import CaptureError
from penstock.torch_internals.dispatch import OperatorMode, modes_left
from penstock.torch_internals.modules import registered_children, replaced_forward, tensor_tables
from penstock.torch_internals.pytrees import tree_map_only, tree_unflatten

NAME = "opening"
"""Of its layer."""


Tables: TypeAlias = tuple[MutableMapping[str, Any], dict[str, Any]]
"""A table of parameters or buffers of a module, and what was in it before the trace."""


class _Reached(BaseException):
    """The block would run now. Code that catches every `Exception` does not catch this."""


class _PythonState:
    """What the functions that have called a block, up to the call of the model, hold beside tensors: a trace of what
    follows has it as it was on the sample.

    All copies of an opening share one, so that the first run on the sample counts.
    """

    def __init__(self) -> None:
        self.captured: tuple[dict[tuple[str, int], Any], list[int]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_PythonState":
        return self

    def check(self, frame: FrameType | None, outermost: int, arguments: Any) -> None:
        """Raises `CaptureError` if the functions from `frame` to the one with the id `outermost` hold something else.

        A number, such as the length of a list, may be the size of a tensor among the `arguments` of the model.
        """
        found: dict[tuple[str, int], Any] = {}
        depth = 0
        while frame is not None and id(frame) != outermost:
            code = frame.f_code
            place = f"{code.co_filename}:{frame.f_lineno}"
            found[f"the line of {code.co_qualname}", depth] = place, frame.f_lasti
            for name in sorted(_read_later(code, frame.f_lasti) & {*frame.f_locals}):
                values = _plain_in(f"{name} in {code.co_qualname}", frame.f_locals[name], _DEEPEST)
                found.update(((inner, depth), value) for inner, value in values)
            frame, depth = frame.f_back, depth + 1
        sizes = [size for each in flatten(arguments)[0] if isinstance(each, Tensor) for size in each.shape]
        before, sizes_before = self.captured = self.captured or (found, sizes)
        for key in {**before, **found}:
            one, other = before.get(key, _NOTHING), found.get(key, _NOTHING)
            # The trace reads no tensor that the block is not given.
            left_out = one is Tensor and other is None
            of_size = type(one) is int and (one, other) in zip(sizes_before, sizes, strict=False)
            if one != other and not (left_out or of_size):
                raise CaptureError(
                    "the model's code before the layer opening ends runs as it is, and what follows was traced with "
                    f"what the sample led to: {key[0]} was {one!r} and is {other!r}. Expected no difference but in "
                    "tensors and their sizes. Decide by values of tensors inside of a block, or with torch.where"
                )


_DEEPEST = 3
"""Objects that are nested deeper than this in a variable are not looked at."""
_NOTHING = "nothing"
_NOT_LOOKED_IN = frozenset(("torch", *sys.stdlib_module_names))


@cache
def _read_later(code: CodeType, offset: int) -> frozenset[Any]:
    """The variables that `code` may read after the instruction at `offset`, in another round of a loop or a function
    inside of it included.
    """
    steps = list(dis.get_instructions(code))
    rounds = (step.argval for step in steps if step.offset > offset and "JUMP_BACKWARD" in step.opname)
    start = min((offset, *rounds))
    names = (step.argval for step in steps if step.offset > start and "LOAD" in step.opname)
    read = {name for each in names for name in (each if isinstance(each, tuple) else (each,))}
    return frozenset((*read, *code.co_cellvars))


def _plain_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """The plain values in `value`, by name, whether they are tensors, and how long lists in it are."""
    if is_plain(value) or isinstance(value, Tensor):
        yield name, Tensor if isinstance(value, Tensor) else value
    elif depth and isinstance(value, nn.Module):
        yield from (
            (f"{name}.{key}", each) for key, each in vars(value).items() if is_plain(each) and key != "training"
        )
    elif depth and isinstance(value, list | tuple | dict):
        yield f"the length of {name}", len(value)
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in () if all(isinstance(each, Tensor) for each in value) else entries:
            yield from _plain_in(f"{name}[{key!r}]", each, depth - 1)
    elif depth and (
        isinstance(value, SimpleNamespace) or type(value).__module__.partition(".")[0] not in _NOT_LOOKED_IN
    ):
        # Objects of Python itself, such as threads, have numbers of their own.
        for key, each in getattr(value, "__dict__", {}).items():
            yield from _plain_in(f"{name}.{key}", each, depth - 1)


class Opening(nn.Module):
    """Calls `model` up to its first call of the block `first`, and returns the arguments of that call.

    Its parts are the modules of `model` without one of the blocks `later`, and of other modules the tensors `read`.
    `tensors`: the leaves of the arguments that are tensors; one that is None now is an empty tensor, since a mask may
    be left out where it hides nothing.
    """

    def __init__(
        self, model: nn.Module, first: str, later: Collection[str], read: Collection[int], tensors: Collection[int]
    ) -> None:
        super().__init__()
        # A method, so that all that the model holds is no part of this module.
        self.whole: Any = model.__call__
        self.first, self.tensors = first, tensors
        self.state, self.training = _PythonState(), model.training
        self.parts = nn.ModuleList(_without(model, "", later))
        inside = set(self.parts.modules())
        for module in (each for each in model.modules() if each not in inside):
            for table, own in zip(tensor_tables(module), tensor_tables(self), strict=True):
                own.update((f"{len(own)}_{key}", each) for key, each in table.items() if id(each) in read)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        call, outermost = (args, kwargs), id(currentframe())

        def reached(*args: Any, **kwargs: Any) -> None:
            found.append((args, kwargs))
            self.state.check(cast(FrameType, currentframe()).f_back, outermost, call)
            raise _Reached

        model, names = self.whole.__self__, self.first.split(".")
        # Where only this module evaluates, the modules around the block do not yet.
        others = range(len(names)) if self.training != model.training else ()
        around = [model.get_submodule(".".join(names[:count])) for count in others]
        modes = [module.training for module in around]
        try:
            for module in around:
                module.training = self.training
            with replaced_forward(model.get_submodule(self.first), reached):
                self.whole(*args, **kwargs)
        except _Reached:
            leaves, structure = flatten(found[0])
            none = torch.empty(0, device=next((each.device for each in leaves if isinstance(each, Tensor)), None))
            pairs = enumerate(leaves)
            return tree_unflatten(
                [none if i in self.tensors and each is None else each for i, each in pairs], structure
            )
        finally:
            for module, mode in zip(around, modes, strict=True):
                module.training = mode
        raise CaptureError(f"the model has not called its block {self.first}, as it did on the sample")


def _without(module: nn.Module, path: str, later: Collection[str]) -> Iterator[nn.Module]:
    """The largest modules in `module` in which none of the blocks `later` lies."""
    if not any(f"{each}.".startswith(f"{path}." if path else "") for each in later):
        yield module
    elif path not in later:
        for name, child in registered_children(module):
            yield from _without(child, f"{path}.{name}" if path else name, later)


class TracedOpening(OperatorMode):
    """The opening in a trace of the model: it runs on the real sample, outside of the trace, which begins after it.

    `first`: the block that it ends with. `tables`: those of all modules of the model, each with its real tensors.
    `call`: the arguments in the trace. `stack`: is closed at the end of the trace.
    """

    def __init__(self, first: str, tables: Sequence[Tables], call: Any, stack: ExitStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.first, self.call, self._contexts = first, call, stack
        self._real = stack.enter_context(ExitStack())
        self._read: set[int] = set()
        """The ids of all tensors that it has read."""
        self.returned: set[int] = set()
        """The ids of the tensors in the trace that it returns."""
        self.objects: dict[int, Anew] = {}
        """The objects that are no tensors, by id, among what it returns."""
        self.lost: set[int] = set()
        """The leaves of what the model returns that only the opening knows."""
        self._tables = tables
        self._known: dict[int, tuple[Tensor, Any]] = {}
        """Real tensors, by id, each with what it is in the trace."""
        self._made: TensorNotes[bool] = TensorNotes()

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self._read.update(map(id, tensors_in((*args, *kwargs.values()))))
        self._made.write(tensors_in((result,)), True)
        return result

    def tensors(self) -> list[Tensor]:
        """The parameters and buffers that it has read."""
        return [each for _, own in self._tables for each in own.values() if id(each) in self._read]

    def begin(self, sample: Any) -> Any:
        """Runs what follows outside of the trace. Returns a copy of the real arguments `sample`."""
        for mode in (modes_left(), torch.no_grad()):
            self._real.enter_context(mode)
        for table, own in self._tables:
            self._real.callback(table.update, dict(table))
            table.update(own)
        leaves, structure = flatten(sample)
        leaves = [each.clone() if isinstance(each, Tensor) else each for each in leaves]
        self._know(leaves, flatten(self.call)[0])
        self._real.enter_context(self)
        return tree_unflatten(leaves, structure)

    def end(self, given: Any, enter: Callable[[Any], Any]) -> Any:
        """Begins the trace, and returns the arguments of the first block in it. `given`: the real ones; `enter`: makes
        those of a trace out of the arguments of the model.
        """
        leaves, structure = flatten(given)
        for leaf in leaves:
            if not (is_plain(leaf) or isinstance(leaf, Tensor)):
                # Outside of the trace, where its tensors are real. What cannot be copied is refused later.
                with suppress(Exception):
                    self.objects[id(leaf)] = Anew(leaf)
        self._real.close()
        self._contexts.enter_context(_Translated(self))
        stand_ins, _ = flatten(enter(self.call))
        self._know(leaves, stand_ins)
        self.returned.update(id(each) for each in stand_ins if isinstance(each, Tensor))
        return tree_unflatten(
            [its if type(own) is int else self.stand_in(own) for own, its in zip(leaves, stand_ins, strict=True)],
            structure,
        )

    def _know(self, leaves: Sequence[Any], stand_ins: Sequence[Any]) -> None:
        for own, its in zip(leaves, stand_ins, strict=True):
            if isinstance(own, Tensor):
                self._known.setdefault(id(own), (own, its))

    def stand_in(self, leaf: Any) -> Any:
        """What `leaf` is in the trace. Raises `CaptureError` for a tensor that only the opening knows."""
        if id(leaf) in self._known:
            return self._known[id(leaf)][1]
        if isinstance(leaf, Tensor) and self._made.read(leaf):
            raise CaptureError(
                f"the code behind the first call of {self.first} reads a tensor of shape {tuple(leaf.shape)} that code "
                "before this call has computed and that is none of its arguments"
            )
        return leaf

    def results(self, leaves: Sequence[Any]) -> list[Any]:
        """What `leaves`, of what the model returns, are in the trace; None for `lost` ones."""
        found = []
        for index, leaf in enumerate(leaves):
            try:
                found.append(self.stand_in(leaf))
            except CaptureError:
                self.lost.add(index)
                found.append(None)
        return found


class _Translated(TorchFunctionMode):
    """Has operators take what the real tensors of an opening are in the trace."""

    def __init__(self, opening: TracedOpening) -> None:
        super().__init__()
        self._opening = opening

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._opening.stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)
