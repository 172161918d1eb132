"""What a model takes and returns, apart from its numbers: names, nesting, constants, and the sizes that a capture
holds for.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from penstock.arguments import text_of
from penstock.errors import CaptureError
from penstock.torch_internals import pytrees as pytree

_FUNCTIONS = {
    "__builtins__": {},
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
    "math": math,
    # Its functions of sizes, such as sym_float, take numbers, too.
    "torch": torch,
}
_SIZE = re.compile(r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class SizeGuard:
    """A condition on the sizes of inputs that the model's code asked about, such as whether a length is even.

    A trace took the branch that the sample's sizes lead to, so it holds only for sizes that lead to the same branch.
    """

    text: str
    """In Python, such as ``(args[0].shape[1] % 2) == 0``."""
    sizes: tuple[tuple[str, int], ...]
    """The inputs, and the indices of their dimensions, that `code` names ``size_0``, ``size_1`` and so on."""
    code: CodeType

    @classmethod
    def of(cls, expression: str, names: Sequence[str]) -> "SizeGuard":
        """Reads a guard of `torch.export` on a forward that takes ``*tensors``, the inputs `names`."""
        sizes: dict[tuple[str, int], None] = {}

        def named(found: re.Match[str]) -> str:
            size = names[int(found[1])], int(found[2])
            sizes.setdefault(size)
            return f"size_{list(sizes).index(size)}"

        code = _SIZE.sub(named, expression)
        text = _SIZE.sub(lambda found: f"{names[int(found[1])]}.shape[{found[2]}]", expression)
        return cls(text, tuple(sizes), compile(code, "<size guard>", "eval"))

    def holds(self, shapes: Mapping[str, Sequence[int]]) -> bool:
        """Whether inputs of `shapes` fulfil it. Raises `CaptureError` if that cannot be found out."""
        found: dict[str, Any] = {f"size_{i}": shapes[name][index] for i, (name, index) in enumerate(self.sizes)}
        try:
            return bool(eval(self.code, _FUNCTIONS, found))
        except (NameError, TypeError, AttributeError) as error:
            raise CaptureError(
                f"the model's code depends on sizes in a way that cannot be checked in later steps: {self.text} "
                f"({error}). Compute it in a block, or pass the model as a list of layers"
            ) from error


@dataclass(frozen=True, slots=True, eq=False)
class ModelInputs:
    """The form of the arguments that the model was captured with."""

    names: tuple[str, ...]
    """A value name for every leaf of ``(args, kwargs)``, in pytree order."""
    structure: pytree.TreeSpec
    constants: Mapping[str, Any]
    """The leaves that are not tensors. The capture holds for these values only."""
    batched: frozenset[str]
    """The tensors whose dimension 0 counts samples; the others go whole to every microbatch."""
    microbatch_size: int
    """Samples in the captured sample."""
    sizes: Mapping[str, tuple[tuple[int, int | None], ...]] = field(default_factory=dict)
    """For a tensor's dimensions: the least and the greatest size that the capture holds for, None where none is."""
    equal: tuple[tuple[tuple[str, int], ...], ...] = ()
    """Groups of dimensions, as tensor and index, that the capture holds for only if they are of one size."""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The types that the capture holds for; the model's code may ask whether a mask is boolean."""
    guards: tuple[SizeGuard, ...] = ()
    """Other conditions on sizes that the capture holds for."""
    whole_rows: Mapping[str, int] = field(default_factory=dict)
    """Dimension 0 of the tensors in the sample that go whole to every microbatch."""
    named: tuple[tuple[Any, ...], dict[str, Any]] = field(init=False, repr=False)
    """The positional arguments and the keywords, with names in the places of their leaves."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", self.structure.unflatten(self.names))

    def read(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of `batch` by value name.

        `batch`: a tuple or list of positional arguments, a mapping of keywords, or the one argument, which may itself
        be a list, a dict or a named tuple if it was in the sample. Raises `CaptureError` as `bind` does.
        """
        args, kwargs = self.named
        single = len(args) == 1 and not kwargs and type(batch) is type(args[0])
        # A plain tuple of one is the arguments, as everywhere.
        if single and not (type(batch) is tuple and len(batch) == 1):
            return self.bind((batch,), {})
        match batch:
            case Mapping():
                return self.bind((), batch)
            case tuple() | list():
                return self.bind(tuple(batch), {})
            case _:
                return self.bind((batch,), {})

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of ``model(*args, **kwargs)`` by value name.

        Raises `CaptureError` if the arguments differ from the captured ones in structure or in a constant.
        """
        captured_args, captured_kwargs = self.named
        if sorted(kwargs) != sorted(captured_kwargs) or len(args) != len(captured_args):
            two = len(args) == 2 and len(captured_args) == 1 and not kwargs
            hint = " (inputs and target are two arguments: pipe.step(x, y), not a list)" if two else ""
            raise CaptureError(
                f"the model was captured with {_signature(len(captured_args), captured_kwargs)} and is now called with "
                f"{_signature(len(args), kwargs)}: pass the same arguments as in sample=, or capture again{hint}"
            )
        ordered = {name: kwargs[name] for name in captured_kwargs} if kwargs else {}
        names: Sequence[str] = [*captured_args, *captured_kwargs.values()]
        leaves, structure = [*args, *ordered.values()], self.structure
        # Nothing is nested in most calls, neither then nor now, and need not be looked through.
        for name, leaf in zip(names, leaves, strict=True):
            if type(name) is not str or not isinstance(leaf, Tensor):
                names = self.names
                leaves, structure = pytree.tree_flatten((args, ordered))
                break
        if structure != self.structure:
            raise CaptureError(
                f"the arguments have another structure than the captured sample: expected {self.structure}, "
                f"found {structure}. Pass the same nesting of tuples, lists and dicts as in sample="
            )
        tensors: dict[str, Tensor] = {}
        for name, leaf in zip(names, leaves, strict=True):
            if name in self.constants:
                check_constant(name, self.constants[name], leaf)
            elif not isinstance(leaf, Tensor):
                raise CaptureError(
                    f"{name}: expected a tensor, as in sample=, found {_shown(leaf)}: pass a tensor, or capture again"
                )
            else:
                tensors[name] = leaf
                if leaf.dtype != self.dtypes.get(name, leaf.dtype):
                    raise CaptureError(
                        f"{name} was {self.dtypes[name]} in sample= and is now {leaf.dtype}, for which the model's "
                        f"code may do something else: pass it as .to({self.dtypes[name]}), or capture again"
                    )
                _check_sizes(name, self.sizes.get(name, ()), leaf, free=name in self.batched)
        for group in self.equal:
            found = {f"dimension {index} of {name}": tensors[name].shape[index] for name, index in group}
            if len(set(found.values())) > 1:
                raise CaptureError(
                    f"the capture holds for equal sizes only, which the model's code asked for: {found}. Pass tensors "
                    "that agree there, or capture again with a sample= of the new shapes"
                )
        return tensors

    def check_samples(self, samples: int, tensors: Mapping[str, Tensor] | None = None) -> None:
        """Raises `CaptureError` if the capture does not hold for a microbatch of `samples` out of the batch `tensors`,
        by value name.
        """
        for name in self.names:
            bounds = self.sizes.get(name, ())
            if name in self.batched and bounds and not _fits(samples, *bounds[0]):
                if bounds[0][0] == bounds[0][1]:
                    raise CaptureError(
                        f"{name} has {samples} sample(s) in a microbatch, and the model's code takes "
                        f"{bounds[0][0]} only, as in sample= (the number of samples was taken to be "
                        f"{self.microbatch_size}, dimension 0 of {sorted(self.batched)[0]}; microbatch_size= says "
                        "otherwise). If the number is written in the code, write x.shape[0] there. Or pass batches of "
                        "that many samples for every microbatch, or capture with a sample= of the microbatch's size"
                    )
                raise CaptureError(
                    f"{name} has {samples} sample(s) in a microbatch, but the capture holds for "
                    f"{_size_text(*bounds[0])}: for other numbers the model's code may do something else. Pass larger "
                    "or smaller batches, or use other microbatches="
                )
        if self.guards and tensors is not None:
            shapes = {
                name: (samples, *tensor.shape[1:]) if name in self.batched else tuple(tensor.shape)
                for name, tensor in tensors.items()
            }
            for guard in self.guards:
                if not guard.holds(shapes):
                    found = ", ".join(f"{name}.shape[{index}] = {shapes[name][index]}" for name, index in guard.sizes)
                    raise CaptureError(
                        f"the model's code asked, outside of its blocks, whether {guard.text}, which held for sample= "
                        f"and does not hold for a microbatch with {found}: the trace would compute something else than "
                        "the model. Pass such sizes, move this code into a block, or capture again"
                    )

    def check_whole(self, samples: int, tensors: Mapping[str, Tensor]) -> None:
        """Raises `CaptureError` if one of `tensors`, those of a batch of `samples` by name, goes whole to every
        microbatch and has grown with the number of samples since the capture.
        """
        lengths = {size for name in self.batched for size in tensors[name].shape[1:]}
        for name, rows in self.whole_rows.items():
            found = tensors[name].shape[0] if tensors[name].ndim else 0
            if found not in (rows, *lengths) and found * self.microbatch_size == rows * samples:
                raise CaptureError(
                    f"{name}: expected dimension 0 of {rows}, as in sample=, found {found}: it grows with the number "
                    f"of samples ({self.microbatch_size} in sample=, {samples} now), and would go whole to every "
                    "microbatch. Pass it with the samples as dimension 0, such as (samples, patches, ...), or cut the "
                    "batch yourself: pipe.step(penstock.Microbatches(inputs, targets))"
                )


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """The form of what the model returns."""

    structure: pytree.TreeSpec
    leaves: tuple[str | None, ...]
    """For every leaf, the value that it is; None for a leaf that is a constant."""
    constants: tuple[Any, ...]
    """For every leaf, its constant (None where the leaf is a value)."""

    @property
    def values(self) -> tuple[str, ...]:
        """The values that the output is built from, each once."""
        return tuple(dict.fromkeys(name for name in self.leaves if name is not None))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """What the model returns, of the same types as the model's own output, out of a tensor for each of `values`."""
        if self.structure.is_leaf() and len(tensors) == 1:
            return tensors[0]
        values = dict(zip(self.values, tensors, strict=True))
        leaves = [
            constant if name is None else values[name]
            for name, constant in zip(self.leaves, self.constants, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self.structure)

    def tensors_of(self, result: Any) -> list[Tensor]:
        """The tensors in `result`, which the model has returned, that are values; not what only an opening knows."""
        numbered = pytree.tree_leaves_with_path(self.structure.unflatten(range(len(self.leaves))))
        places = {path for path, index in numbered if self.leaves[index] is not None}
        found = pytree.tree_leaves_with_path(result)
        return [leaf for path, leaf in found if path in places and isinstance(leaf, Tensor)]


def _signature(positional: int, keywords: Mapping[str, Any]) -> str:
    return f"{positional} positional argument(s) and keywords {sorted(keywords)}"


def _check_sizes(name: str, sizes: tuple[tuple[int, int | None], ...], tensor: Tensor, free: bool) -> None:
    """`free`: dimension 0 counts samples, of which each microbatch will have fewer."""
    if not sizes:
        return
    bounds = list(zip(sizes, tensor.shape, strict=False))[int(free) :]
    if len(sizes) != tensor.dim() or not all(_fits(size, *bound) for bound, size in bounds):
        expected = ", ".join(_size_text(least, most) for least, most in sizes)
        raise CaptureError(
            f"{name} has shape {tuple(tensor.shape)}, but the capture holds for ({expected}): for other sizes the "
            "model's code may do something else. Pass such a tensor, or capture again with a sample= of the new shape"
        )


def _fits(size: int, least: int, most: int | None) -> bool:
    return least <= size and (most is None or size <= most)


def _size_text(least: int, most: int | None) -> str:
    if most is None:
        return f"at least {least}" if least else "any"
    return str(least) if least == most else f"{least} to {most}" if least else f"at most {most}"


def check_constant(name: str, captured: object, found: object) -> None:
    """Raises `CaptureError` unless `found`, which is not a tensor, equals what was `captured`."""
    if not _same(captured, found):
        raise CaptureError(
            f"{name} was {_shown(captured)} when the model was captured and is now {_shown(found)}. A value that is "
            "not a tensor is fixed by the capture: pass the same one, or capture again with the new one in sample="
        )


def _same(captured: object, found: object) -> bool:
    if captured is found:
        return True
    try:
        return type(captured) is type(found) and bool(captured == found)
    except Exception:
        # Objects that hold arrays may not say whether they are equal.
        return False


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else text_of(value)
