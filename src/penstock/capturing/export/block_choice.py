"""The model's own blocks: where its layers begin and end.

Rules, from the root of the module tree down:
  1. A list (ModuleList, ModuleDict) is opened, since it is never called: its children are looked at one by one. So is
     a Sequential, unless it is itself an element of a stack, such as Sequential(Linear, Tanh), and holds modules of
     several classes.
  2. The root is opened, and a root's only child that does anything.
  3. A module that holds a stack (a ModuleList of modules with children of their own) is opened, unless it is itself an
     element of a stack: a transformer's block is not opened though it may hold lists.
  4. An element of a stack is opened if all that it does lies in one container of modules of one class: the stages of a
     residual network, whose blocks are the true elements.
  5. Whatever is not opened is a block.

Blocks without children of their own (an embedding, a norm, a head) join their neighbours of the same kind when the
model has a stack: what comes before it is one layer, and what comes after it is another.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from penstock.capturing.export.openings import NAME as OPENING
from penstock.torch_internals.modules import registered_children

_LONGEST_JOINED_RUN = 4


@dataclass(frozen=True, slots=True)
class _Working:
    """Where a model computes something."""

    own: frozenset[str]
    """Paths of the modules that compute something themselves."""
    around: frozenset[str]
    """These, and those of the modules around them."""

    @classmethod
    def of(cls, paths: Collection[str]) -> "_Working":
        around = set(paths)
        for path in paths:
            while path := path.rpartition(".")[0]:
                around.add(path)
        return cls(frozenset(paths), frozenset(around))


def choose_blocks(model: nn.Module, working: Collection[str]) -> frozenset[str]:
    """Paths of the modules that are blocks; `working` are those of the modules that compute something themselves."""
    return frozenset(_select(model, "", _Working.of(working), in_stack=False))


def group_calls(model: nn.Module, calls: Sequence[tuple[str, str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Layers from block calls: each is a name and the keys of its calls.

    `calls`: (path of the block, key of the call), in the order of the model's run.
    """
    composite = [_is_composite(model.get_submodule(path)) for path, _ in calls]
    runs: list[list[int]] = []
    for index in range(len(calls)):
        if runs and not composite[index] and not composite[runs[-1][-1]]:
            runs[-1].append(index)
        else:
            runs.append([index])
    groups: list[list[int]] = []
    for run in runs:
        weighted = [index for index in run if _bytes(model.get_submodule(calls[index][0]))]
        if sum(composite) >= 1 and len(weighted) <= _LONGEST_JOINED_RUN:
            groups.append(run)
            continue
        for index in run:
            # A pooling or an activation has nothing to be placed: it goes with what is before it.
            if index in weighted or not groups or groups[-1][-1] != index - 1 or composite[index - 1]:
                groups.append([index])
            else:
                groups[-1].append(index)
    return _name(model, calls, groups)


def _name(
    model: nn.Module, calls: Sequence[tuple[str, str]], groups: Sequence[Sequence[int]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    seen: dict[str, int] = {}
    named = []
    for group in groups:
        path = max((calls[index][0] for index in group), key=lambda path: _bytes(model.get_submodule(path)))
        count = seen.get(path, 0)
        seen[path] = count + 1
        path = path or OPENING
        named.append((f"{path}@{count}" if count else path, tuple(calls[index][1] for index in group)))
    return tuple(named)


def _select(module: nn.Module, path: str, working: _Working, in_stack: bool) -> list[str]:
    children = _children(module, path, working)
    if not children or not _opens(module, path, working, in_stack):
        return [path]
    inner = in_stack or _is_stack(module, path, working)
    found: list[str] = []
    for name, child in children:
        found += _select(child, name, working, inner)
    return found


def _opens(module: nn.Module, path: str, working: _Working, in_stack: bool) -> bool:
    children = _children(module, path, working)
    if path == "":
        return True
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        # It is never called: what runs is what it holds.
        return True
    if isinstance(module, nn.Sequential):
        return not in_stack or _is_homogeneous(module, path, working)
    if in_stack:
        # The module itself may do nothing between its children, else a cut would fall inside it.
        holders = [(name, child) for name, child in children if _is_container(child)]
        alone = len(children) == 1 and len(holders) == 1
        return alone and path not in working.own and _is_homogeneous(holders[0][1], holders[0][0], working)
    if "." not in path and len(children) > 0 and _is_only_child(path, working):
        return True
    return _holds_stack(module, path, working)


def _is_only_child(path: str, working: _Working) -> bool:
    return all(other == path or other.startswith(path + ".") for other in working.own if other)


def _holds_stack(module: nn.Module, path: str, working: _Working) -> bool:
    return any(
        _is_stack(child, name, working) or (not _is_stack_element(child) and _holds_stack(child, name, working))
        for name, child in _children(module, path, working)
    )


def _is_stack_element(module: nn.Module) -> bool:
    return not _is_container(module) and not any(True for _ in module.children())


def _is_stack(module: nn.Module, path: str, working: _Working) -> bool:
    """Whether it is a list of modules with children of their own; in a Sequential, two of the same class."""
    composite = [type(child) for _, child in _children(module, path, working) if _is_composite(child)]
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return bool(composite)
    return isinstance(module, nn.Sequential) and len(composite) > len(set(composite))


def _is_homogeneous(module: nn.Module, path: str, working: _Working) -> bool:
    children = [child for _, child in _children(module, path, working)]
    return all(map(_is_composite, children)) and len({type(child) for child in children}) == 1


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _children(module: nn.Module, path: str, working: _Working) -> list[tuple[str, nn.Module]]:
    """The children with something in them that works."""
    found = []
    for name, child in registered_children(module):
        inner = f"{path}.{name}" if path else name
        if inner in working.around:
            found.append((inner, child))
    return found


def _bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
