"""Which buffers a forward may write: those that must be saved before one that is to be repeated.

Of a traced layer its operators tell. BatchNorm writes its statistics without declaring it, so that operators of that
kind count as writers whatever their schema says. A block that was not traced may write any of its buffers.
"""

import operator
from typing import TypeAlias

from torch import nn
from torch.fx import GraphModule, Node

from penstock.torch_internals.dispatch import schema_of
from penstock.torch_internals.modules import registered_buffers

Place: TypeAlias = tuple[nn.Module, str]
"""A module and the name under which it, and not one of its submodules, registers a buffer."""

SILENT_WRITERS = ("batch_norm", "instance_norm")


def find_writable(module: nn.Module) -> tuple[Place, ...]:
    """The buffers of `module` that its forward may write, each under every name that it is registered by."""
    places: dict[Place, None] = {}
    waiting, seen = [module], set[nn.Module]()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if isinstance(current, GraphModule):
            places.update(dict.fromkeys(_written_by(current)))
            called = (str(node.target) for node in current.graph.find_nodes(op="call_module"))
            waiting += [current.get_submodule(target) for target in called]
        else:
            places.update(((current, name), None) for name in registered_buffers(current))
            waiting += current.children()
    return tuple(places)


def _written_by(module: GraphModule) -> list[Place]:
    places: list[Place] = []
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(path)
        if name in registered_buffers(owner) and _is_written(node):
            places.append((owner, name))
    return places


def _is_written(node: Node) -> bool:
    """Whether an operator writes `node`, or what shares its memory."""
    return any(_writes(user, node) or (_is_view(user) and _is_written(user)) for user in node.users)


def _writes(user: Node, node: Node) -> bool:
    if user.target is operator.getitem:
        return False
    schema = schema_of(user.target)
    if schema is None:
        return True  # the result of the layer, which another one may write, or an operator with operators inside
    if any(kind in str(user.target) for kind in SILENT_WRITERS):
        return True
    arguments = schema.arguments
    given = [*zip(arguments, user.args, strict=False), *((a, user.kwargs.get(a.name)) for a in arguments)]
    return any(a.alias_info is not None and a.alias_info.is_write and value is node for a, value in given)


def _is_view(user: Node) -> bool:
    if user.target is operator.getitem:
        return True
    schema = schema_of(user.target)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
