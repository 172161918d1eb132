"""Modules' private names: what each gives, and what stands in where it is gone."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import batchnorm

from penstock.torch_internals.modules import (
    compiled_from,
    is_batch_norm,
    is_compiled,
    is_hooked,
    is_persistent,
    own_reset,
    registered_buffers,
    runs_plainly,
    tensor_tables,
)
from penstock.torch_internals.unimported import is_instance


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("later", None)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.inner = nn.BatchNorm1d(1)


def nothing(*arguments: Any) -> None: ...


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
        lambda module, hook: module.register_forward_hook(hook, with_kwargs=True, always_call=True),
        lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    ],
)
def test_every_hook_is_seen(register: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    assert not is_hooked(module)

    handle = register(module, nothing)

    assert is_hooked(module)
    assert not runs_plainly(module)
    assert not is_hooked(module[0])
    handle.remove()
    assert not is_hooked(module)


def test_a_compiled_module_is_seen() -> None:
    module = nn.Linear(1, 1)
    assert not is_compiled(module)
    assert runs_plainly(module)

    module.compile(backend="eager")

    assert is_compiled(module)
    assert not runs_plainly(module)


def test_buffers_are_those_of_the_module_itself_with_empty_ones() -> None:
    module = Buffers()

    found = registered_buffers(module)
    found["kept"] = None

    assert list(found) == ["kept", "later", "scratch"]
    assert found["later"] is None and found["scratch"] is module.scratch
    assert module.kept is not None, "it is a copy"


@pytest.mark.parametrize("private", [True, False])
def test_persistent_buffers_are_those_of_the_state_dict(private: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Buffers()
    if not private:
        whole = module.state_dict(keep_vars=True)
        monkeypatch.delattr(module, "_non_persistent_buffers_set")
        # Its own state dict cannot be made any more; a PyTorch without the name would make it another way.
        monkeypatch.setattr(module, "state_dict", lambda keep_vars: whole)

    assert is_persistent(module, "kept")
    assert not is_persistent(module, "scratch")


def test_tables_follow_the_module() -> None:
    module = Buffers()
    parameters, buffers = tensor_tables(module.inner)
    module.inner.weight = nn.Parameter(torch.zeros(1))
    module.inner.running_mean = torch.ones(1)

    assert parameters["weight"] is module.inner.weight
    assert buffers["running_mean"] is module.inner.running_mean


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm1d(1), True),
        (nn.BatchNorm2d(1), True),
        (nn.BatchNorm3d(1), True),
        (nn.SyncBatchNorm(1), True),
        (nn.LazyBatchNorm1d(), True),
        (nn.InstanceNorm1d(1, track_running_stats=True), False),
        (nn.LayerNorm(1), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_batch_norms_are_known(
    module: nn.Module, expected: bool, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not private:
        monkeypatch.delattr(batchnorm, "_BatchNorm")

    assert is_batch_norm(module) is expected


@pytest.mark.parametrize("make", [lambda: nn.Linear(2, 2), lambda: nn.MultiheadAttention(2, 1)])
def test_a_module_resets_itself(make: Callable[[], nn.Module]) -> None:
    module = make()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    reset = own_reset(module)

    assert reset is not None
    torch.manual_seed(5)
    reset()
    assert any(not torch.equal(before[name], parameter) for name, parameter in module.named_parameters())


def test_a_module_without_a_reset_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_reset(nn.GELU()) is None
    monkeypatch.delattr(nn.MultiheadAttention, "_reset_parameters")
    assert own_reset(nn.MultiheadAttention.__new__(nn.MultiheadAttention)) is None


def test_the_module_inside_of_a_compiled_wrapper_is_found() -> None:
    module = nn.Linear(1, 1)

    assert compiled_from(torch.compile(module)) is module  # type: ignore[arg-type]
    assert compiled_from(module) is None


def test_a_class_has_instances_only_where_its_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_instance(nn.Linear(2, 2), "torch.not_imported", "Linear") and "torch.not_imported" not in sys.modules
    assert is_instance(nn.Linear(2, 2), "torch.nn", "Linear") and not is_instance(nn.ReLU(), "torch.nn", "Linear")
    # Another thread may be importing it.
    monkeypatch.setitem(sys.modules, "torch.not_imported", ModuleType("torch.not_imported"))
    assert not is_instance(nn.Linear(2, 2), "torch.not_imported", "Linear")
