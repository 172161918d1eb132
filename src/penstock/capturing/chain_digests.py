"""A captured chain as a short text that processes can compare.

Chains with one digest have the same layers, values and constants. The numbers in weights do not count, nor which device
of its kind a process uses.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.capturing.chain import Layer, LayerChain
from penstock.capturing.fresh_objects import is_plain
from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.capturing.module_state import is_plain_memory
from penstock.capturing.sequential import EagerLayer, Form

_DEVICE = re.compile(r"(device\(type='\w+'), index=\d+")


def digest_of(chain: LayerChain) -> str:
    """The same for chains that compute the same, as far as their layers and the code between blocks tell."""
    found = hashlib.blake2b(digest_size=16)
    for part in (_of_inputs(chain.inputs), _of_output(chain.output), _of_layers(chain.layers)):
        for fact in part:
            found.update(f"{fact!r}\n".encode(errors="backslashreplace"))
    return found.hexdigest()


def _of_inputs(inputs: ModelInputs) -> Iterator[Any]:
    yield inputs.names, str(inputs.structure), sorted(inputs.batched), inputs.microbatch_size
    yield [(name, _constant(value)) for name, value in inputs.constants.items()]
    yield inputs.sizes, inputs.equal, inputs.dtypes, [guard.text for guard in inputs.guards]


def _of_output(output: ModelOutput) -> Iterator[Any]:
    yield str(output.structure), output.leaves, list(map(_constant, output.constants))


def _of_layers(layers: Iterable[Layer]) -> Iterator[Any]:
    constants: dict[int, str] = {}
    for layer in layers:
        yield layer.name, layer.inputs, layer.outputs, layer.output_kinds
        yield layer.random, layer.mutates, layer.volatile, layer.views
        waiting: list[nn.Module] = [layer.module]
        while waiting:
            module = waiting.pop()
            yield type(module).__qualname__
            if isinstance(module, EagerLayer):
                # Its body is a module of the model.
                yield module.name, form_facts(module.takes), form_facts(module.returns)
                yield module.evaluates, module.gradients, module.by_forward
                yield sorted({inner.training for inner in module.modules()})
                continue
            if isinstance(module, GraphModule):
                yield _DEVICE.sub(r"\1", module.code)
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if id(tensor) not in constants:
                    constants[id(tensor)] = _of_constant(tensor)
                yield name, constants[id(tensor)]
            waiting += module.children()


def form_facts(form: Form) -> tuple[str, list[str]]:
    """What two captures can compare `form` by."""
    return str(form.structure), list(map(_constant, form.constants))


def _constant(value: Any) -> str:
    """A plain one by its value, which may name a device; any other by its class."""
    if isinstance(value, type):
        return value.__qualname__
    return _DEVICE.sub(r"\1", repr(value)) if is_plain(value) else type(value).__qualname__


def _of_constant(tensor: Tensor) -> str:
    """A parameter by its form; what else a layer holds by its content."""
    form = repr((tuple(tensor.shape), tensor.dtype, tensor.device.type))
    if isinstance(tensor, nn.Parameter) or not is_plain_memory(tensor):
        return form
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return form + hashlib.blake2b(content, digest_size=16).hexdigest()
