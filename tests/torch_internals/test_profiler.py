"""Whether a profiler is active, and what stands in where its private name is gone."""

import pytest
from torch.autograd import profiler

from penstock.torch_internals.autograd import is_profiling


def test_a_profiler_is_noticed() -> None:
    assert not is_profiling()
    with profiler.profile():
        assert is_profiling()
    assert not is_profiling()


def test_without_the_name_labels_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiler, "_is_profiler_enabled")

    assert is_profiling()
