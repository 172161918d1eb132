"""What a captured chain was made of and what came of it, as a short text that processes can compare.

Chains with one digest are equal as far as their checks go: the same code on the same shapes. The numbers in weights do
not count, nor which device of its kind a process uses, nor what lists, dicts and other objects in modules hold: what a
trace has read of these is in its code, and blocks run as they are.
"""

import hashlib
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.capturing.chain import Layer
from penstock.capturing.chain_checks import UncheckedChain
from penstock.capturing.fresh_objects import is_plain
from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.capturing.module_state import is_plain_memory
from penstock.capturing.read_names import code_read
from penstock.capturing.samples import flatten
from penstock.capturing.sequential import EagerLayer, Form
from penstock.torch_internals.modules import hooks_of, tensor_tables
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks

__all__ = ["digest_of", "form_facts"]

_OWN_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_FUNCTIONS = (FunctionType, MethodType, partial)
_DEVICE = re.compile(r"(device\(type='\w+'), index=\d+")


def digest_of(unchecked: UncheckedChain) -> str | None:
    """Equal in processes of which one can check the chain for all; None if this process has to check its own.

    That is so for a model that waits for other processes in its forward, or might in the hooks of its parameters, and
    for one with generators of random numbers of its own, which a check moves: they are to be at one place in all
    processes.
    """
    sampled = unchecked.sampled
    if sampled is None:
        return ""
    modules = dict(sampled.model.named_modules())
    # There are few classes and many values.
    held = {type(value): value for module in modules.values() for value in vars(module).values()}
    hooked = any(gradient_hooks(each) or accumulated_hooks(each) for each in sampled.model.parameters())
    if unchecked.communicates or hooked or any(isinstance(value, _OWN_GENERATORS) for value in held.values()):
        return None
    chain = unchecked.chain
    leaves, _ = flatten((sampled.call.args, sampled.call.kwargs))
    found = hashlib.blake2b(digest_size=16)
    for part in (
        [torch.__version__, sys.version, [check.runs for check in unchecked.checks]],
        _of_inputs(chain.inputs),
        _of_output(chain.output),
        ((tuple(leaf.shape), leaf.dtype, leaf.device.type) for leaf in leaves if isinstance(leaf, Tensor)),
        _of_model(modules, held),
        _of_layers(chain.layers),
    ):
        for fact in part:
            found.update(f"{fact!r}\n".encode(errors="backslashreplace"))
    return found.hexdigest()


def _of_inputs(inputs: ModelInputs) -> Iterator[Any]:
    yield inputs.names, str(inputs.structure), sorted(inputs.batched), inputs.microbatch_size
    yield [(name, _constant(value)) for name, value in inputs.constants.items()]
    yield inputs.sizes, inputs.equal, inputs.dtypes, [guard.text for guard in inputs.guards]


def _of_output(output: ModelOutput) -> Iterator[Any]:
    yield str(output.structure), output.leaves, list(map(_constant, output.constants))


def _of_model(modules: Mapping[str, nn.Module], values: Mapping[type, Any]) -> Iterator[Any]:
    """Its code, and the plain values that its modules hold. `values`: one of each class among their attributes."""
    plain = {kind for kind, value in values.items() if is_plain(value)}
    functions = {kind for kind, value in values.items() if isinstance(value, _FUNCTIONS)}
    seen: set[type] = set()
    for path, module in modules.items():
        kind, held = type(module), vars(module)
        yield path, kind.__module__, kind.__qualname__, [each for each in held.items() if type(each[1]) in plain]
        for table in tensor_tables(module):
            yield [
                (name, tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad)
                for name, tensor in table.items()
                if tensor is not None
            ]
        yield [type(hook).__qualname__ for hook in hooks_of(module)]
        if kind not in seen or not functions.isdisjoint(map(type, held.values())):
            seen.add(kind)
            yield sorted(repr(_of_code(code)) for code in code_read(module))


def _of_code(code: CodeType) -> tuple[Any, ...]:
    """Without file and lines, which may differ, and with sets in order."""
    constants = [
        _of_code(value)
        if isinstance(value, CodeType)
        else sorted(map(repr, value))
        if isinstance(value, frozenset)
        else repr(value)
        for value in code.co_consts
    ]
    return code.co_name, code.co_code, code.co_names, code.co_varnames, constants


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
