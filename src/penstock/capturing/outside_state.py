"""What a model holds outside of its blocks when a pipeline is built, to see whether it was changed since.

Blocks are called as the Python that they are, and a change of them counts as in a plain loop. The code between them was
traced: a new temperature, another block in a list or a hook on the model would be ignored in silence.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.module_state import is_plain
from penstock.capturing.read_names import names_read
from penstock.capturing.sequential import bodies_of, is_plain_sequential
from penstock.errors import PenstockError
from penstock.torch_internals.modules import TENSOR_TABLES, hooks_of

_COMPARED = (list, tuple, dict, set, deque, Tensor, FunctionType, MethodType, partial)
"""Attributes that are compared if the code reads them: all else may belong to other code."""


class OutsideState:
    """The modules of `model` that are in no block of `chain`: their attributes, hooks, and what they register.

    It is empty for a list of layers, which has no code of its own, and for a model without weights.
    """

    def __init__(self, model: nn.Module | Sequence[Any], chain: LayerChain) -> None:
        self._contents: list[tuple[str, Mapping[str, Any], str, Any]] = []
        """Of each entry of a table: the path of the module, the table, the name and the content."""
        self._keys: list[tuple[str, nn.Module, frozenset[str]]] = []
        self._hooks: list[tuple[str, nn.Module, list[Any]]] = []
        self._modes: list[tuple[str, nn.Module, bool]] = []
        if not isinstance(model, nn.Module) or any(parameter.is_meta for parameter in model.parameters()):
            return
        inside = {id(inner) for body in bodies_of(chain.layers) for inner in body.modules()}
        for path, module in model.named_modules():
            if id(module) in inside:
                continue
            held, read = vars(module), names_read(module)
            self._contents += [
                (path, held, key, _content(value))
                for key, value in held.items()
                if (is_plain(value) and key != "training") or (key in read and isinstance(value, _COMPARED))
            ]
            for table in (held.get(name, {}) for name in TENSOR_TABLES):
                self._contents += [(path, table, name, _content(found)) for name, found in table.items()]
            self._keys.append((path, module, frozenset(held)))
            self._hooks.append((path, module, hooks_of(module)))
            if not is_plain_sequential(model):
                self._modes.append((path, module, module.training))

    def check(self) -> None:
        """Raises `PenstockError` that names what was changed."""
        for path, table, key, content in self._contents:
            now = table.get(key)
            if content is not now and content != _content(now):
                raise _changed(path, key, content, now)
        for path, module, keys in self._keys:
            held = vars(module)
            for key in held.keys() - keys if len(held) != len(keys) else ():
                # What its code kept in an attribute of the class.
                own = getattr_static(type(module), key, held[key])
                if _content(own) != _content(held[key]):
                    raise _changed(path, key, own, held[key])
        for path, module, training in self._modes:
            if module.training != training:
                mode = "training" if module.training else "evaluation"
                raise PenstockError(
                    f"{path or 'the model'} is in {mode} mode and was in the other one when the pipeline was built. "
                    "Expected the same mode. The code outside of its blocks was traced in that mode, so its dropout "
                    f"would not follow. Call model.train({training}) before step(); evaluate() and predict() run in "
                    "evaluation mode whatever the model is in"
                )
        for path, module, hooks in self._hooks:
            if hooks_of(module) != hooks:
                raise _changed(path, "hooks", hooks, hooks_of(module))


def _changed(path: str, name: str, before: Any, now: Any) -> PenstockError:
    where = f"{path}.{name}" if path else name
    plain = is_plain(before) and is_plain(now)
    return PenstockError(
        f"{where} {f'was {before!r} and is {now!r}' if plain else 'was changed or replaced'} since the pipeline was "
        "built. It is outside of the model's blocks, where code was traced: steps would not see the change. Expected "
        "no change. Change it before the pipeline is built, build a new Pipeline, or keep it in a block"
    )


def _content(value: Any) -> Any:
    """What `value` holds, to be compared: containers by their content, and all but plain values by which they are."""
    match value:
        case list() | tuple() | deque():
            return type(value), tuple(map(_content, value))
        case dict():
            return dict, tuple((key, _content(inner)) for key, inner in value.items())
        case set():
            return set, frozenset(map(_content, value))
        case MethodType():
            return id(value.__self__), value.__func__
        case _:
            return value if is_plain(value) else _Object(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object that equals itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
