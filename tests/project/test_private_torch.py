"""Private names of other packages, PyTorch's above all, are touched in one room only: `penstock.torch_internals`.

The check reads the source. It knows no types, so it goes by names: one underscore in front, and not a name that a class
or a file of Penstock's gives. A name that PyTorch's classes have, too, is theirs wherever it is not asked of `self`.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn

from project.test_architecture import FLOW, SOURCES
from support.architecture import parse, room_of
from support.paths import ROOT

ROOM = "torch_internals"
DOCUMENTED = {"os._exit", "sys._current_frames"}
"""Names that the Python documentation has, underscore and all."""


@cache
def trees() -> dict[str, ast.Module]:
    """Every module of the library, parsed by the first test and not by each process that collects the tests."""
    return {module: parse(text) for module, text in SOURCES.items()}


@cache
def private_names_given() -> frozenset[str]:
    return frozenset(name for tree in trees().values() for name in given_names(tree) if is_private(name))


def is_private(name: str) -> bool:
    return re.fullmatch(r"_(?!_)\w+", name) is not None


def given_names(tree: ast.AST) -> Iterator[str]:
    """The private names that a file gives: functions, methods, classes, variables, attributes of `self` and slots."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                yield from (part.value for part in ast.walk(value) if isinstance(part, ast.Constant))  # type: ignore[misc]


OWNERS = (
    *(torch, torch.Tensor, torch.UntypedStorage, torch.optim.Optimizer, torch.autograd.Variable, torch.autograd.graph),
    *(nn.Linear(1, 1), nn.Sequential(), nn.MultiheadAttention(1, 1), torch.fx.symbolic_trace(nn.Identity())),
    *(torch.ops.aten.add.Tensor, torch.zeros((), requires_grad=True).exp().grad_fn, torch.optim.SGD([torch.zeros(1)])),
    *(dist.ProcessGroup, dist.ProcessGroupGloo, dist.distributed_c10d, dist.tensor.DTensor, torch.compiler),
    dist.ProcessGroupGloo._Options,  # type: ignore[attr-defined]
)
TORCHS = {name for owner in OWNERS for name in dir(owner) if is_private(name)}


def touched(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of every touch of a private name that is not Penstock's."""
    for node in ast.walk(tree):
        if any(_touches(node)):
            yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def _touches(node: ast.AST) -> Iterator[bool]:
    match node:
        case ast.Import(names=names):
            yield from (_is_inner(alias.name) for alias in names)
        case ast.ImportFrom(module=str(source), names=names):
            inner = [alias.name for alias in names] if source.partition(".")[0] != "penstock" else []
            yield from (_is_inner(name) for name in (source, *inner))
        case ast.Attribute(value=owner, attr=name) if is_private(name) and ast.unparse(node) not in DOCUMENTED:
            own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
            yield name not in private_names_given() or (name in TORCHS and not own)
        case ast.Call(func=ast.Name(id="getattr" | "setattr" | "delattr"), args=[_, asked, *_]):
            yield from (_is_foreign(start) for start in _starts(asked))
        case ast.Constant(value=str(text)):
            # Wherever it is used: in a table of names, say. The slots of our classes are in `private_names_given`.
            yield text in TORCHS and text not in private_names_given()
        case ast.keyword(arg=str(name)):
            yield is_private(name) and name not in private_names_given()


def names_in(node: ast.AST) -> Iterator[str]:
    """The private names that `node` touches."""
    match node:
        case ast.ImportFrom(module=str(source), names=names):
            yield from (f"{source}.{alias.name}" if is_private(alias.name) else source for alias in names)
        case ast.Attribute(attr=name):
            yield name
        case ast.Call(args=[_, asked, *_]):
            yield from _starts(asked)
        case ast.Constant(value=str(text)):
            yield text
        case _:
            raise AssertionError(ast.unparse(node))


def _starts(asked: ast.expr) -> Iterator[str]:
    """How the name that `asked` makes can begin."""
    match asked:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            yield text
        case ast.BinOp(left=left):
            yield from _starts(left)


def _is_inner(path: str) -> bool:
    return any(is_private(part) for part in path.split("."))


def _is_foreign(start: str) -> bool:
    private = start.startswith("_") and not start.startswith("__")
    return private and not any(own.startswith(start) for own in private_names_given())


def test_private_names_of_torch_are_touched_in_one_room() -> None:
    broken = [
        f"{module}:{line}: {text}"
        for module, tree in trees().items()
        # A subclass of another library's class overrides and calls the private methods of that one.
        if room_of(module, FLOW) not in (ROOM, "integrations")
        for line, text in touched(tree)
    ]

    assert broken == [], "give each a named function in penstock.torch_internals, or take a public name"


def test_the_table_of_the_room_has_every_name_and_version() -> None:
    """A name by its last part, and a group of names by their beginning."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "src" / "penstock" / ROOM / "names.md").read_text().splitlines()
        if line.startswith("| ") and "`" in line
    ]
    listed: dict[str, list[str]] = {}
    for file, names, _ in rows:
        listed.setdefault(file, []).extend(re.findall(r"`([^`]+)`", names))
    lowest, above = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", (ROOT / "pyproject.toml").read_text())[0]
    every = " ".join(f"2.{minor}" for minor in range(int(lowest), int(above)))

    for module, tree in trees().items():
        file = module.rpartition(".")[2]
        if room_of(module, FLOW) == ROOM:
            text, known = SOURCES[module], " ".join(listed.get(file, ()))
            private = {name for node in ast.walk(tree) if any(_touches(node)) for name in names_in(node)}
            assert {name for name in private - {"_getframe"} if name not in known} == set(), module
            assert [name for name in listed.get(file, ()) if re.split(r"\*|\.(?=\w+$)", name)[-1] not in text] == []
    # What no CPU has says where it has run.
    assert {tried for _, names, tried in rows if not re.search("NCCL|_cuda_", names)} == {every}


def test_the_room_touches_some() -> None:
    """The check sees what is there."""
    assert {module for module, tree in trees().items() if room_of(module, FLOW) == ROOM and any(touched(tree))} == {
        f"penstock.torch_internals.{name}"
        for name in ("autograd", "dispatch", "distributed", "export", "modules", "pytrees", "tensors")
    }


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._inductor.config as config",
        "from torch import _C",
        "from torch._dynamo.exc import UserError",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "def late():\n    from torch.distributed.distributed_c10d import _get_default_store",
        "torch._foreach_norm(tensors)",
        "torch._C._nn.linear(x, w)",
        "torch.ops.aten._unsafe_view(x, [2])",
        "dist.distributed_c10d._get_default_store()",
        "Variable._execution_engine.run_backward(*arguments)",
        "version = tensor._version",
        "pointer = tensor.untyped_storage()._cdata",
        "node.grad_fn._saved_self",
        "operator._dispatch_cache.clear()",
        "module._buffers[name] = buffer",
        "self._buffers[name] = buffer",
        "self.module._forward_hooks",
        "del parameter._local_tensor",
        "options._timeout = delay",
        "for name, child in module._modules.items(): pass",
        "match node:\n    case torch._ops.OpOverload(): pass",
        "getattr(node, '_saved_mat1')",
        "getattr(node, f'_saved_{name}')",
        "getattr(node, '_saved_' + name)",
        "setattr(module, '_compiled_call_impl', None)",
        "NAMES = ('reset_parameters', '_reset_parameters')",
        "torch.nn.functional.embedding(x, w, _padding=3)",
        "sys._getframe(1)",
        "class Mode(torch.utils._python_dispatch.TorchDispatchMode): pass",
    ],
)
def test_a_touch_elsewhere_is_a_breach(source: str) -> None:
    assert [line for line, _ in touched(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations",
        "from penstock.capturing.chain import StageModule",
        "self._lay_out()",
        "measured._panel",
        "'_lay_out'",
        "getattr(owner, name)",
        "getattr(owner, '_lay_out')",
        "module.__dict__",
        "os._exit(1)",
        "named_buffers = module.named_buffers(recurse=False)",
        "_ = tensor",
    ],
)
def test_what_is_public_or_our_own_is_none(source: str) -> None:
    assert {"_lay_out", "_panel"} <= private_names_given()
    assert list(touched(ast.parse(source))) == []


def test_names_that_penstock_and_torch_both_give_are_torchs() -> None:
    """On `self` they are Penstock's: no class of ours that inherits from PyTorch may give such a name."""
    inheriting = [
        (module, node)
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.search(r"Module|Mode|Tensor|Dataset|GraphModule", _bases(node))
    ]
    both = {f"{module}.{node.name}": sorted(set(given_names(node)) & TORCHS) for module, node in inheriting}

    assert both
    assert {name: names for name, names in both.items() if names} == {}


def _bases(node: ast.ClassDef) -> str:
    return " ".join(chain(map(ast.unparse, node.bases)))
