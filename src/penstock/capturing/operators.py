"""The operators that a layer runs on the sample: what each computes and how many bytes it moves.

They are counted in the run of a capture that looks at every layer, so counting needs no run of its own. A dispatch mode
sees the operators below autograd; it changes no tensor and no state of a module.

Floating-point operations are those of PyTorch's own counter (`torch.utils.flop_counter`), which also has the formulas
of `register_flop_formula` for operators of the user's own. An operator without a formula only moves bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from penstock.capturing.module_state import is_plain_memory
from penstock.torch_internals.dispatch import OperatorMode, schema_of
from penstock.torch_internals.tensors import storage_key
from penstock.torch_internals.unimported import compiled_code_runs_eagerly

_Note = TypeVar("_Note")


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One call of an operator in a forward."""

    flops: int
    """Floating-point operations; a multiplication and an addition are two. 0 where they are not known or not many."""
    moved_bytes: int
    """The bytes that it reads and writes."""
    element_bytes: int
    """The size of an element of its result, which decides how fast a device computes."""
    backwards: int
    """How many times as much as this forward its backward takes.

    A product of two matrices has another product in its backward for each factor that needs a gradient. Any other
    operator counts as two if it needs one.
    """


class TensorNotes(Generic[_Note]):
    """Notes for the tensors of one run. It keeps no tensor alive, and looks notes up for every operator of a run."""

    def __init__(self) -> None:
        self._notes: dict[int, tuple[ref[Tensor], _Note]] = {}

    def write(self, tensors: Iterable[Tensor], note: _Note) -> None:
        """Writes `note` for each of `tensors`, in place of what it had."""
        for tensor in tensors:
            self._notes[id(tensor)] = ref(tensor), note

    def read(self, tensor: Tensor) -> _Note | None:
        """The note of `tensor`; None if it has none."""
        found = self._notes.get(id(tensor))
        # Another tensor may have had the id.
        return found[1] if found is not None and found[0]() is tensor else None


class ParameterWrites:
    """Finds those of `parameters` that operators write, and has `save` called with each before."""

    def __init__(self, parameters: Iterable[nn.Parameter], save: Callable[[nn.Parameter], None]) -> None:
        self._by_memory = {storage_key(p.untyped_storage()): p for p in parameters if is_plain_memory(p)}
        self._save = save

    def seen(self, args: Sequence[Any]) -> list[nn.Parameter]:
        """The parameters that an operator with the arguments `args`, which writes the first, is about to write."""
        written = (
            self._by_memory.get(storage_key(t.untyped_storage())) for t in tensors_in(args[:1]) if is_plain_memory(t)
        )
        found = [parameter for parameter in written if parameter is not None]
        for parameter in found:
            self._save(parameter)
        return found


class OperatorCounter(OperatorMode):
    """Counts the operators of its body, layer after layer of one run of a model. `watched`: tensors of which it notes
    that an operator reads or writes them. `save` is called with a parameter among these before it is written.
    """

    def __init__(
        self, watched: Iterable[Tensor] = (), save: Callable[[nn.Parameter], None] = lambda parameter: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        watched = list(watched)
        self._watched = frozenset(map(id, watched))
        self._writes = ParameterWrites((each for each in watched if isinstance(each, nn.Parameter)), save)
        self._read: list[Tensor] = []
        self._written: list[nn.Parameter] = []
        self._noted: list[OperatorCall] = []
        self._trained: TensorNotes[bool] = TensorNotes()
        """Tensors whose gradient a backward computes, by id. Capture runs without autograd: nothing else says so."""
        self._kinds: dict[Any, _Kind] = {}
        self._formulas = {**_FORMULAS, **{str(target): formula for target, formula in flop_registry.items()}}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the operators of its body.

        What is compiled runs eagerly: nothing is compiled under a dispatch mode, and with ``fullgraph=True`` that would
        be an error.
        """
        with compiled_code_runs_eagerly(), self:
            yield

    def take(self) -> tuple[OperatorCall, ...]:
        """The operators since the last call."""
        noted, self._noted = tuple(self._noted), []
        return noted

    def take_touched(self) -> tuple[list[Tensor], list[nn.Parameter]]:
        """The watched tensors that operators have read, and parameters that they have written, since the last call."""
        found, self._read, self._written = (self._read, self._written), [], []
        return found

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = _kind_of(func, self._formulas)
        if self._watched:
            self._read += [each for each in tensors_in((*args, *kwargs.values())) if id(each) in self._watched]
            self._written += self._writes.seen(args) if kind.writes else ()
        result = func(*args, **kwargs)
        if kind.works:
            self._note(kind, args, kwargs, result)
        elif kind.has_gradient and args and isinstance(args[0], Tensor) and self._is_trained(args[0]):
            self._mark([result] if isinstance(result, Tensor) else tensors_in((result,)))
        return result

    def _mark(self, made: Sequence[Tensor]) -> None:
        self._trained.write((each for each in made if each.is_floating_point() or each.is_complex()), True)

    def _is_trained(self, tensor: Tensor) -> bool:
        return tensor.requires_grad or self._trained.read(tensor) is not None

    def _note(self, kind: "_Kind", args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given = tensors_in(args)
        if kwargs:
            given += tensors_in(kwargs.values())
        made = [result] if isinstance(result, Tensor) else tensors_in((result,))
        if not made:
            return
        trained = [tensor for tensor in given if self._is_trained(tensor)]
        if trained:
            self._mark(made)
        flops = kind.count(args, kwargs, result)
        element_bytes = made[0].element_size()
        moved_bytes = sum(map(_bytes, made))
        if kind.gathers:
            # It reads what it selects; the gradient of what it selects from is filled with zeros first, as a whole.
            moved_bytes += moved_bytes + sum(map(_bytes, given[1:]))
            if any(tensor is given[0] for tensor in trained):
                self._noted.append(OperatorCall(0, _bytes(given[0]), element_bytes, 0))
        else:
            moved_bytes += sum(map(_bytes, given))
        backwards = 2 if trained else 0
        if flops:
            # A bias needs no product.
            backwards = min(2, sum(tensor.dim() > 1 for tensor in trained))
        self._noted.append(OperatorCall(flops, moved_bytes, element_bytes, backwards))


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of an operator before it is called."""

    writes: bool
    """Whether it writes its arguments."""
    works: bool
    """Whether it reads or writes elements; a view does not."""
    has_gradient: bool
    gathers: bool
    formula: Callable[..., int] | None

    def count(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
        """The floating-point operations of a call; 0 if they are not known."""
        if self.formula is None:
            return 0
        try:
            return int(self.formula(*args, **kwargs, out_val=result))
        except Exception:
            # A formula refuses arguments that it does not know, such as fewer heads of keys than of queries.
            return 0


def _kind_of(operator: Any, formulas: Mapping[str, Callable[..., int]]) -> _Kind:
    name = str(operator).rpartition(".")[0] or str(operator)
    return _Kind(
        writes=bool((schema := schema_of(operator)) is not None and schema.is_mutable),
        works=name not in _FREE and not getattr(operator, "is_view", False),
        has_gradient=name != "aten.detach",
        gathers=name in _GATHERS,
        formula=formulas.get(name),
    )


def _attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> int:
    return 4 * query.numel() * key.shape[-2]


def _grouped_products(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _recurrence(steps: Tensor, *weights: Any, **kwargs: Any) -> int:
    """A row of `steps` is multiplied with every weight."""
    held = sum(weight.numel() for weight in tensors_in(weights) if weight.dim() == 2)
    return 2 * (steps.numel() // max(steps.shape[-1], 1)) * held


_FORMULAS: Mapping[str, Callable[..., int]] = {
    "aten._grouped_mm": _grouped_products,
    "aten._cudnn_rnn": _recurrence,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten.mkldnn_rnn_layer": _recurrence,
}
"""Operators that PyTorch's counter has no formula for."""
_GATHERS = frozenset({"aten.embedding", "aten.gather", "aten.index", "aten.index_select"})
_FREE = frozenset({"aten._unsafe_view", "aten.empty", "aten.empty_like", "aten.empty_strided", "aten.lift_fresh"})
"""Operators that neither read nor write."""


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments or the results of an operator."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def _bytes(tensor: Tensor) -> int:
    """The bytes that the elements of `tensor` take in memory; those that `expand` repeats count once."""
    size = tensor.numel() * tensor.element_size()
    if size and tensor.layout is torch.strided and 0 in tensor.stride():
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            size //= 1 if stride else length
    return size
