"""What the state dict of a model has beside its parameters and buffers: extra state, and what hooks and code of modules
add to it, or change in it.

The modules' own ``state_dict`` makes it, and their own ``load_state_dict`` takes it over, with all hooks. What is of a
module that only stages of other processes hold is left to these.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import copied_value, read_value
from penstock.runtime.checkpoints.own_states import keep_copy
from penstock.runtime.parameters.shards import assign
from penstock.runtime.transport.plain_values import encode
from penstock.torch_internals.modules import loads_itself
from penstock.torch_internals.pytrees import tree_map_only
from penstock.torch_internals.subclasses import plain_tensors
from penstock.values.plan_stages import Stage


class ModuleEntries:
    """The entries of the state dict of `model`, of `chain`, for a process with `stages`."""

    def __init__(self, model: nn.Module, chain: LayerChain, stages: Sequence[Stage]) -> None:
        self._model, self._chain = model, chain
        own = {index for stage in stages for index in range(stage.start, stage.stop)}
        layers = [{id(inner) for inner in layer.module.modules()} for layer in chain.layers]
        here = set[int]().union(*(layers[index] for index in own))
        away = set[int]().union(*layers) - here
        self._paths = {path: id(module) not in away for path, module in model.named_modules(remove_duplicate=False)}
        """By the path of a module, whether it is one of this process."""

    def is_here(self, name: str) -> bool:
        """Whether the entry `name` is of a module of this process, or of one that no layer holds."""
        while name:
            name = name.rpartition(".")[0]
            if name in self._paths:
                return self._paths[name]
        return True

    def takes(self, name: str) -> bool:
        """Whether a module may take over the entry `name` beside its tensors."""
        return any(name.startswith(prefix) for prefix, _ in self._loaders())

    def collect(self) -> dict[str, Any]:
        """What is no parameter and no buffer, or differs from it; not copies."""
        model = self._model
        registered: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        registered.update(model.named_buffers(remove_duplicate=False))
        # Not of the instance: a model that is not whole in this process may refuse it.
        found: Mapping[str, Any] = type(model).state_dict(model, keep_vars=True)
        return {
            name: tree_map_only(Tensor, Tensor.detach, value)
            for name, value in found.items()
            if registered.get(name) is not value and self.is_here(name)
        }

    def restore(self, state: Mapping[str, Any], held: Mapping[str, Tensor]) -> None:
        """Writes the numbers of `state` into the tensors `held`, and gives modules the rest, or what they change."""
        before, known = self.collect(), self._chain.parameters.keys() | self._chain.buffers.keys()
        written = {name: tensor for name, tensor in held.items() if name not in before}
        with torch.no_grad():
            for name, tensor in written.items():
                for own, given in zip(plain_tensors(tensor), plain_tensors(state[name]), strict=True):
                    assign(own, read_value(given))
        plain = {name: tensor for name, tensor in written.items() if type(tensor) in (Tensor, nn.Parameter)}
        entries = {n: value for n, value in state.items() if self.is_here(n) and (n in before or n not in known)}
        for prefix, module in self._loaders():
            if not self.is_here(prefix):
                continue
            own = {name: copied_value(value) for name, value in entries.items() if name.startswith(prefix)}
            own |= {name: tensor.detach() for name, tensor in plain.items() if name.startswith(prefix)}
            try:
                # With the versions of its modules, which their code asks for.
                given = module.state_dict(keep_vars=True)
                given.clear()
                given.update({name.removeprefix(prefix): value for name, value in own.items()})
                found = module.load_state_dict(given, strict=False)
            except Exception as error:
                raise CheckpointError(
                    f"load_state_dict of {prefix.rstrip('.') or 'the model'} refused its entries: "
                    f"{type(error).__name__}: {error}. Build the model as then"
                ) from error
            for key in getattr(found, "unexpected_keys", ()):
                name = prefix + key
                if name not in before or _form(before[name]) != _form(entries[name]):
                    raise CheckpointError(
                        f"{name} of the state was taken over by no module, and the model has another value: expected "
                        "code that loads what it saves. Give its module a hook that does, or build the model as then"
                    )

    def _loaders(self) -> Iterator[tuple[str, nn.Module]]:
        """The outermost modules that load more than tensors, each with how its names begin."""
        seen = list[str]()
        for path, module in self._model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            if not any(prefix.startswith(other) for other in seen) and loads_itself(module):
                seen.append(prefix)
                yield prefix, module


def _form(value: Any) -> Any:
    """`value` as what equals that of an equal one."""
    return encode(value, "an entry", partial(keep_copy, {}))
