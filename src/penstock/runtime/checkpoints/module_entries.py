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
from penstock.runtime.files.plain_values import encode
from penstock.runtime.parameters.shards import assign
from penstock.torch_internals.modules import loads_itself
from penstock.torch_internals.pytrees import tree_map_only
from penstock.torch_internals.subclasses import plain_tensors
from penstock.values.plan_stages import Stage


class ModuleEntries:
    """The entries of the state dict of `model`, of `chain`, for a process with `stages`."""

    def __init__(self, model: nn.Module, chain: LayerChain, stages: Sequence[Stage]) -> None:
        self._model = model
        self.tensors = chain.parameters.keys() | chain.buffers.keys()
        layers = [{id(inner) for inner in layer.module.modules()} for layer in chain.layers]
        here = set[int]().union(*(own for stage in stages for own in layers[stage.start : stage.stop]))
        away = set[int]().union(*layers) - here
        self._paths = {path: id(module) not in away for path, module in model.named_modules(remove_duplicate=False)}
        """By the path of a module, whether it is one of this process."""

    def is_here(self, name: str) -> bool:
        """Whether the entry `name` is of a module of this process, or of one that no layer holds."""
        while name and name not in self._paths:
            name = name.rpartition(".")[0]
        return self._paths[name]

    def is_frozen(self, name: str, value: Any) -> bool:
        """Whether the entry is a tensor of a module whose own parameters are all frozen."""
        while name and name not in self._paths:
            name = name.rpartition(".")[0]
        own = list(self._model.get_submodule(name).parameters(recurse=False))
        return isinstance(value, Tensor) and bool(own) and not any(parameter.requires_grad for parameter in own)

    def takes(self, name: str) -> bool:
        """Whether the entry `name` is of another process, or a module may take it over beside its tensors."""
        return not self.is_here(name) or any(name.startswith(prefix) for prefix, _ in self._loaders())

    def collect(self) -> dict[str, Any]:
        """What is no parameter and no buffer, or differs from it; not copies."""
        model = self._model
        # Not of the instance: a model that is not whole in this process may refuse it.
        found: Mapping[str, Any] = type(model).state_dict(model, keep_vars=True)
        # After it: fully sharded modules put their shards back in a hook of it.
        registered: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        registered.update(model.named_buffers(remove_duplicate=False))
        own = {name: value for name, value in found.items() if registered.get(name) is not value and self.is_here(name)}
        return {name: tree_map_only(Tensor, Tensor.detach, value) for name, value in own.items()}

    def restore(self, state: Mapping[str, Any], held: Mapping[str, Tensor]) -> None:
        """Writes the numbers of `state` into the tensors `held`, and gives modules the rest, or what they change."""
        before = self.collect()
        written = {name: tensor for name, tensor in held.items() if name not in before}
        with torch.no_grad():
            for name, tensor in written.items():
                for own, given in zip(plain_tensors(tensor), plain_tensors(state[name]), strict=True):
                    assign(own, read_value(given))
        entries = {n: state[n] for n in state if self.is_here(n) and (n in before or n not in self.tensors)}
        plain = {n: tensor.detach() for n, tensor in written.items() if type(tensor) in (Tensor, nn.Parameter)}
        left = dict.fromkeys(entries, "no code of the model loads it")
        for prefix, module in self._loaders():
            if self.is_here(prefix):
                own = [name for name in entries if name.startswith(prefix)]
                try:
                    # With the versions of its modules, which their code asks for.
                    given = module.state_dict(keep_vars=True)
                    given.clear()
                    given.update({n.removeprefix(prefix): plain[n] for n in plain if n.startswith(prefix)})
                    given.update({name.removeprefix(prefix): copied_value(entries[name]) for name in own})
                    over = getattr(module.load_state_dict(given, strict=False), "unexpected_keys", ())
                except Exception as error:
                    left.update(dict.fromkeys(own or [prefix], f"its code raises {type(error).__name__}: {error}"))
                    continue
                for name in own:
                    if name.removeprefix(prefix) not in over:
                        del left[name]
        for name, why in left.items():
            if name not in before or _form(before[name]) != _form(copied_value(entries[name])):
                raise CheckpointError(
                    f"{name} of the state: expected that the model takes it over or has the same value, found another "
                    f"one, and {why}. Build the model as then, or give the module what loads its state dict"
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
    """What equal values have in common, and no others."""
    return encode(value, "an entry", partial(keep_copy, {}))
