"""One run of a model, watched by hooks: for every call of a module, the structure of its arguments and results, and the
sizes of the tensors in them; and which tensors leave a module in another way.

A block that is not traced hands on its results only. What leaves it in an attribute, a cache or by a hook would be
missing in a trace, or would be that of the sample for ever, so such a block is traced like the code between blocks.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.module_copies import Copies
from penstock.capturing.operators import TensorNotes
from penstock.capturing.preservation import python_generators
from penstock.capturing.samples import Call, flatten
from penstock.torch_internals.modules import replaced_forward, tensor_tables
from penstock.torch_internals.pytrees import TreeSpec


@dataclass(slots=True, eq=False)
class ModuleCall:
    """One call of a module in one run."""

    arguments: list[torch.Size]
    numbers: list[int]
    objects: list[Any]
    """For every leaf: the class `Tensor` for a tensor, else the object."""
    structure: TreeSpec | None = None
    leaves: list[Any] = field(default_factory=list)
    """A `ResultShape`, or what is not a tensor."""
    given: frozenset[int] = frozenset()
    """The ids of the parameters among the arguments."""
    by_forward: bool = False
    """Whether it was ``module.forward(x)``, which runs no hooks, and not ``module(x)``."""


@dataclass(frozen=True, slots=True, eq=False)
class ResultShape:
    """A tensor that a module returned."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "ResultShape":
        stride = tuple(tensor.stride()) if tensor.layout == torch.strided else ()
        return cls(tensor.shape, tensor.dtype, tensor.device, stride)


ModuleCalls: TypeAlias = dict[str, list[ModuleCall]]
"""The calls in one run, by path of the module."""
_, _LEAF = flatten(0)


class TensorOwners:
    """Follows, in one run of a model, which module may use a tensor: the one that made it or got it as a result."""

    def __init__(self) -> None:
        self.escapes: set[tuple[str, str]] = set()
        """The modules, by path, that a tensor escaped from, each with one that used it."""
        self._owners: TensorNotes[str] = TensorNotes()

    def note(self, path: str, used: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        """Notes that the module `path` computes `made` of `used`."""
        for tensor in used:
            owner = self._owners.read(tensor)
            if owner is not None and owner != path and not is_inside(path, owner):
                self.escapes.add((owner, path))
        self._owners.write(made, path)

    def returned(self, path: str, caller: str, results: Iterable[Tensor]) -> None:
        """Notes that the module `path` returns `results` to `caller`, or, with equal paths, that the model ends."""
        for tensor in results:
            owner = self._owners.read(tensor)
            if owner is None or (owner != path and is_inside(path, owner)):
                continue
            if owner != path:
                self.escapes.add((owner, path))
            self._owners.write((tensor,), caller)


class Watch:
    """Watches one run of a copy of `model`, which is one of `copies`.

    `paths`: the modules whose calls are noted; None for all, and then also whether the model uses the generators of
    Python and NumPy. `by_forward`: the modules of which calls of ``module.forward(x)`` are noted, too. `closely`: looks
    at these generators in every call of a module. `first`: the block whose first arguments are taken for the result of
    the model, which is then the call of an opening.
    """

    def __init__(
        self,
        model: nn.Module,
        copies: Copies,
        paths: Collection[str] | None = None,
        *,
        by_forward: Collection[str] = (),
        closely: bool = False,
        first: str | None = None,
    ) -> None:
        self.model = copies.of(model)
        self._first = first
        self._copies = copies
        self.paths = paths
        self.by_forward = by_forward
        self.closely = closely
        self.calls: ModuleCalls = defaultdict(list)
        self.working: set[str] = set()
        self.drawing: set[str] = set()
        self.drawing_elsewhere: set[str] = set()
        self.owners = TensorOwners()
        self.writes: set[tuple[str, int]] = set()
        """The modules that write a parameter, each with the id of it."""
        self.parameters_read: dict[str, set[int]] = defaultdict(set)
        """The ids of the parameters that a module, or what it calls, reads, apart from those among its arguments."""
        self.replaced: set[str] = set()
        """Modules that were called with other tensors in the place of their parameters, by functional_call."""
        self._own = {id(parameter) for parameter in model.parameters()}
        self._stack: list[tuple[str, ModuleCall]] = []
        self._generators = python_generators() if paths is None else {}

    def run(self, call: Call) -> Any:
        """What the model returns for `call`."""
        with ExitStack() as hooks:
            for path, module in self.model.named_modules():
                # A scripted module takes no hooks and runs none of its modules: what it does its parent does.
                if isinstance(module, torch.jit.ScriptModule) or (self.paths is not None and path not in self.paths):
                    continue
                for handle in (
                    module.register_forward_pre_hook(partial(self._enter, path), prepend=True, with_kwargs=True),
                    module.register_forward_hook(self._leave, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
                if path in self.by_forward:
                    hooks.enter_context(replaced_forward(module, self._watched_forward(path, module), hooks=True))
            result = self.model(*call.args, **call.kwargs)
            if self.paths is None:
                self._note_draws()
        return result

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.closely:
            self._note_draws()
        if not kwargs and all(type(argument) is Tensor for argument in args):
            made = ModuleCall([argument.shape for argument in args], [], [Tensor] * len(args))
        else:
            leaves, _ = flatten((args, kwargs))
            tensors = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor)]
            objects = [Tensor if isinstance(leaf, Tensor) else self._copies.own(leaf) for leaf in leaves]
            given = frozenset(id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter))
            made = ModuleCall(tensors, [leaf for leaf in leaves if type(leaf) is int], objects, given=given)
        self.calls[path].append(made)
        if path == self._first and self.calls[""][0].structure is None:
            _note_result(self.calls[""][0], (args, kwargs))
        self._stack.append((path, made))
        if any(id(each) not in self._own for each in tensor_tables(module)[0].values() if each is not None):
            self.replaced.add(path)

    def _watched_forward(self, path: str, module: nn.Module) -> Callable[..., Any]:
        run = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if any(own == path for own, _ in self._stack):
                return run(*args, **kwargs)
            self._enter(path, module, args, kwargs)
            self._stack[-1][1].by_forward = True
            result = run(*args, **kwargs)
            self._leave(module, args, kwargs, result)
            return result

        return forward

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.closely:
            self._note_draws()
        path, made = self._stack.pop()
        if made.structure is None:
            leaves = _note_result(made, result)
            if self.paths is None:
                self.owners.returned(path, self._path, (leaf for leaf in leaves if isinstance(leaf, Tensor)))

    @property
    def in_call(self) -> bool:
        """Whether one of the modules runs."""
        return bool(self._stack)

    @property
    def _path(self) -> str:
        """The innermost module that runs."""
        return self._stack[-1][0] if self._stack else ""

    def note_computation(self, depends: bool, draws: bool, used: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Notes that the innermost module computes something that `depends` on parameters, or `draws` numbers."""
        path = self._path
        self.owners.note(path, used, made)
        for tensor in used:
            if isinstance(tensor, nn.Parameter):
                self._note_parameter(id(tensor))
        if depends or draws:
            self.working.add(path)
        if draws:
            self.drawing.add(path)

    def note_write(self, parameter: nn.Parameter) -> None:
        """Notes that the innermost module writes `parameter`."""
        self.writes.add((self._path, id(parameter)))

    def _note_parameter(self, parameter: int) -> None:
        for path, call in reversed(self._stack):
            if parameter in call.given:
                return
            self.parameters_read[path].add(parameter)

    def _note_draws(self) -> None:
        """Notes whether Python's or NumPy's generator was used by the innermost module since the last look."""
        now = python_generators()
        if now != self._generators:
            path = self._path
            self.drawing_elsewhere.add(path)
            self.working.add(path)
        self._generators = now


def _note_result(call: ModuleCall, result: Any) -> list[Any]:
    """Notes what `call` has returned, and returns its leaves."""
    leaves, call.structure = ([result], _LEAF) if type(result) is Tensor else flatten(result)
    call.leaves = [ResultShape.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return leaves


def is_inside(path: str, outer: str) -> bool:
    """Whether the module or attribute `path`, such as ``layer.memory[0]``, is `outer` or in it."""
    return outer in ("", path) or path.startswith((f"{outer}.", f"{outer}["))


def leaky(block: str, escapes: Collection[tuple[str, str]]) -> bool:
    """Whether a tensor escapes from `block` to a module outside of it."""
    return any(is_inside(owner, block) and not is_inside(user, block) for owner, user in escapes)
