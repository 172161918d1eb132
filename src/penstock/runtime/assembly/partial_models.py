"""A model of which this process does not have all newest numbers.

The rest of the user's model keeps old numbers, which a forward, a state dict or a copy would use in silence. So from
the first step or load on, each tensor there has a class that refuses to be read. It stays the same object, and can be
moved, written in place and asked for its shape. Modules and the tensors of this process's stages stay as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.initialization import named_tensors, place, rooted
from penstock.capturing.module_state import find_writable
from penstock.errors import PenstockError
from penstock.runtime.assembly.weight_exports import HeldTensors, held_tensors
from penstock.runtime.transport.worlds import World
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.subclasses import packs
from penstock.values.plan_stages import Stage

_HARMLESS = """__get__ __set__ __len__ dim ndimension size stride numel nelement element_size storage_offset get_device
    is_contiguous is_floating_point is_complex is_signed is_pinned is_shared _has_compatible_shallow_copy_type
    to cpu cuda double float half bfloat16"""
"""Calls that tell no numbers, beside those in place. Of attributes, only those that are no tensors tell none."""


class _Elsewhere:
    """Comes before the class of a tensor whose newest numbers are in another process."""

    path: ClassVar[str]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = func.__name__
        harmless = call in _HARMLESS.split() or (call.endswith("_") and not call.endswith("__"))
        if harmless and all(isinstance(each, _Elsewhere) for each in pytree.tree_leaves(args[:1])):
            result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[misc]
            if isinstance(result, Tensor) and call != "__get__":
                cast(Any, result).__class__ = cls
            if not isinstance(result, Tensor) or call != "__get__":
                return result
        raise PenstockError(
            f"{cls.path}: its newest numbers are in another process: expected reads of what pipe.named_parameters() "
            f"names only, and in a loss_fn of the output, found {call.strip('_')}. Call on all ranks, before "
            "pipe.close(), pipe.evaluate(...) for a loss, pipe.predict(...) for an output, pipe.full_state_dict() or "
            "pipe.save_weights(directory) for all weights, or pipe.gather_model(), which makes it whole until a step"
        )

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__torch_function__(Tensor.__reduce_ex__, (), (self, protocol))

    def __repr__(self) -> str:
        return f"<{self.path}: its newest numbers are in another process>"


@contextmanager
def old_numbers(model: nn.Module | Sequence[Any]) -> Iterator[None]:
    """Lets all of `model` be read in this block, for results that do not depend on its numbers."""
    marked = [(each, type(each)) for each in named_tensors(rooted(model)).values() if isinstance(each, _Elsewhere)]
    for tensor, kind in marked:
        tensor.__class__ = kind.__bases__[1]
    try:
        yield
    finally:
        for tensor, kind in marked:
            tensor.__class__ = kind


class ModelParts:
    """The tensors of `model` that another process holds, where this one holds `stages` of its `chain`."""

    def __init__(self, model: nn.Module | Sequence[Any], chain: LayerChain, stages: Sequence[Stage]) -> None:
        held, written = set(map(id, held_tensors(chain, stages).values())), set[int]()
        for index, layer in enumerate(chain.layers):
            own = any(stage.start <= index < stage.stop for stage in stages)
            (held if own else written).update(id(getattr(owner, name)) for owner, name in find_writable(layer.module))
        away = (written | set(map(id, (*chain.parameters.values(), *chain.buffers.values())))) - held
        self._model = rooted(model)
        self._changes = {
            path: tensor.requires_grad or tensor.is_meta or id(tensor) in written
            for path, tensor in named_tensors(self._model).items()
            if id(tensor) in away
        }
        """By path, whether a step changes it, or it has no numbers here; else only a load may change it."""

    def leave(self, *, loaded: bool = False) -> None:
        """Begins to refuse reads of what a step, or a load where it is `loaded`, changes in other processes."""
        for path, tensor in named_tensors(self._model).items():
            kind = type(tensor)
            if issubclass(kind, _Elsewhere):
                # A new plan may have given it to this process.
                tensor.__class__ = kind if path in self._changes else kind.__bases__[1]
            elif path in self._changes and (loaded or self._changes[path]):
                names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "path": path}
                tensor.__class__ = type(kind.__name__, (_Elsewhere, kind), names)

    def gather(self, world: World, device: torch.device) -> None:
        """Writes the newest numbers into all tensors of the model, but those of packed weights. Collective."""
        tensors = named_tensors(self._model)
        here = {path: tensor for path, tensor in tensors.items() if not isinstance(tensor, _Elsewhere)}
        every = world.gather(set(here))
        owners = {path: rank for rank in reversed(range(world.processes)) for path in every[rank]}
        held = HeldTensors(here, tensors, owners, world)
        moved = owners.keys() - set.intersection(*every)
        for path in [path for path in tensors if path in moved and not packs(tensors[path])]:
            value, tensor = held.bring(path, tensors[path].dtype, None), tensors[path]
            if value is not None and path not in here:
                tensor.__class__ = type(tensor).__bases__[1]
                if tensor.is_meta:
                    torch.utils.swap_tensors(tensor, place(tensor, device))  # type: ignore[no-untyped-call]
                with torch.no_grad():
                    tensor.copy_(value)
