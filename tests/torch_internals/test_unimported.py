"""What is asked about classes of modules without importing these."""

import sys
from types import ModuleType

import pytest
from torch import nn

from penstock.torch_internals.unimported import is_instance


def test_a_class_has_instances_only_where_its_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_instance(nn.Linear(2, 2), "torch.not_imported", "Linear") and "torch.not_imported" not in sys.modules
    assert is_instance(nn.Linear(2, 2), "torch.nn", "Linear") and not is_instance(nn.ReLU(), "torch.nn", "Linear")
    # Another thread may be importing it.
    monkeypatch.setitem(sys.modules, "torch.not_imported", ModuleType("torch.not_imported"))
    assert not is_instance(nn.Linear(2, 2), "torch.not_imported", "Linear")
