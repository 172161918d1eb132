"""What `torch.export` made of a model, kept for the next model that is built the same.

Nearly all the time of a small training run goes into tracing the model: every pipeline, every rank and every oracle
does it anew. A trace has no weights in it, so models of one build that are in the same state have the same trace. Each
process makes it once. All that capture does with a trace it does every time, the comparison with the model included.
"""

import copy
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.fx import GraphModule

from penstock.capturing.export.opaque_blocks import TRACING, TracedCall

_PLAIN = (bool, int, float, str, tuple, type(None), torch.dtype)

_programs: dict[Hashable, tuple[ExportedProgram, list[TracedCall]]] = {}


def built_as(build: str, model: nn.Module) -> nn.Module:
    """`model`, marked as one of those that the build of this name makes, all with the same code and configuration.

    From the first mark on, this process traces a model with a mark only if it has not traced one like it.
    """
    torch.export.export = _export_once  # type: ignore[assignment]
    model.built_as = build  # type: ignore[assignment]
    return model


def _export_once(flat: nn.Module, tensors: tuple[Tensor, ...], **options: Any) -> ExportedProgram:
    # Capture has the model in a module that knows the form of its arguments.
    model = getattr(flat, "model", None)
    # What an opening finds while it is traced is no part of the program.
    if not hasattr(model, "built_as") or TRACING[-1].first is not None:
        return export(flat, tensors, **options)
    # The blocks of the model that is traced, a copy, list no weights.
    form, state = flat.form, _state(TRACING[-1].model)
    arguments = tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)
    around = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_grad_enabled())
    key = (state, arguments, around, form.names, str(form.structure), repr(form.constants), repr(options))
    if key not in _programs:
        made = export(flat, tensors, **options)
        # The weights of the first model need not live as long as the trace.
        made._state_dict = {}
        _programs[key] = made, list(TRACING[-1].traced)
    made, TRACING[-1].traced[:] = _programs[key]
    return _copied(made)


def _state(model: nn.Module) -> Hashable:
    """What a trace of the model may depend on, besides its code: whatever a test may have changed after the build."""
    first: dict[int, str] = {}
    tensors = tuple(
        (name, first.setdefault(id(t), name), tuple(t.shape), t.dtype, t.device, t.requires_grad)
        for named in (model.named_parameters, model.named_buffers)
        for name, t in named(remove_duplicate=False)
    )
    modules = tuple((name, type(module), _attributes(module)) for name, module in model.named_modules())
    return tensors, modules


def _attributes(module: nn.Module) -> Hashable:
    plain = tuple((name, repr(value)) for name, value in vars(module).items() if isinstance(value, _PLAIN))
    # A hook runs in the trace, too: those of other code are not the same.
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return plain, tuple(tuple(found.values()) for found in hooks)


def _copied(program: ExportedProgram) -> ExportedProgram:
    """A program of its own: capture writes in the graph, and a model may write in a constant."""
    own = copy.copy(program)
    graph_module: GraphModule = copy.deepcopy(program.graph_module)
    own._graph_module = graph_module
    own._constants = copy.deepcopy(program.constants)
    return own
