"""The counts of a scan are those of the products that it does, and of the paper."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import PenstockError
from penstock.scan import blelloch, chunked, count, estimate, linear
from penstock.scan.estimates import MACHINES

WIDTH = 3


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrices that are multiplied with matrices and with vectors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.matrices = self.vectors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            left, right = args
            if right.shape[-1] == WIDTH:
                self.matrices += len(left)
            else:
                self.vectors += len(left)
        return func(*args, **(kwargs or {}))


@contextmanager
def products() -> Iterator[Products]:
    with Products() as found:
        yield found


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 33, 100])
def test_counts_are_what_is_multiplied(steps: int) -> None:
    gradient, jacobians = torch.randn(1, WIDTH), torch.randn(steps, 1, WIDTH, WIDTH)
    with products() as done:
        linear(gradient, jacobians)
    assert (0, steps) == (done.matrices, done.vectors)
    with products() as done:
        blelloch(gradient, jacobians, rescale=False)
    counts = count(steps, WIDTH, method="blelloch")
    assert (counts.matrix_products, counts.vector_products) == (done.matrices, done.vectors)
    for workers in (1, 2, 5):
        with products() as done:
            chunked(gradient, jacobians, workers=workers, rescale=False)
        counts = count(steps, WIDTH, method="chunked", workers=workers)
        assert (counts.matrix_products, counts.vector_products) == (done.matrices, done.vectors)
        assert counts.flops == 2 * WIDTH**3 * done.matrices + 2 * WIDTH**2 * done.vectors


@pytest.mark.parametrize(("steps", "levels", "matrices"), [(1, 1, 0), (7, 5, 4), (1000, 18, 985), (1023, 19, 1013)])
def test_levels_and_products(steps: int, levels: int, matrices: int) -> None:
    """The paper's algorithm takes 19 steps and 990 products of matrices for 1,000 steps: a rest is multiplied later."""
    counts = count(steps, 20)

    assert (counts.steps, counts.matrix_products) == (levels, matrices)


def test_no_more_levels_than_in_the_paper() -> None:
    """``2 ceil(log2(n + 1)) - 1``, all of them where pairs come out even."""
    for steps in range(1, 2000):
        paper = 2 * math.ceil(math.log2(steps + 1)) - 1
        found = count(steps, 2).steps
        assert paper - 2 <= found <= paper
        assert found == paper or (steps + 1) & steps


def test_chunks_take_two_passes_and_a_scan_between_them() -> None:
    """Equation 6 of the paper: n / p + log p, for products and for the local pass."""
    assert count(1000, 20, method="chunked", workers=10).steps == 99 + count(9, 20).steps + 100


def test_a_scan_pays_for_long_sequences_of_narrow_states() -> None:
    long = estimate(30_000, 16, 20, device="cuda")
    wide = estimate(30_000, 16, 512, device="cuda")

    assert long.method == "blelloch" and "instead of 30000" in long.reason
    assert wide.method == "torch" and "512 x 512" in str(wide)
    assert estimate(10, 16, 20).method == "torch"
    assert estimate(1000, 16, 20).method == "linear"
    assert estimate(1000, 1, 20, gates=3).method == "blelloch"
    # On CPUs PyTorch has one kernel for all steps of an LSTM. The matrices of its steps have 40 x 40 values.
    assert estimate(1000, 1, 20, gates=4).method == "torch"
    # So has cuDNN, for all recurrences. The record of an H200 has 1 ms for 1,000 steps, and 3.4 ms for a scan.
    assert (
        estimate(1000, 16, 20, device="cuda").method == estimate(1000, 1, 20, gates=4, device="cuda").method == "torch"
    )
    assert "40 x 40" in str(estimate(10, 16, 20, gates=4))


def test_the_estimate_follows_the_machine() -> None:
    slow_calls = replace(MACHINES["cpu"], call_seconds=1.0, torch_step_seconds=5.0)

    assert estimate(10, 1, 4, machine=slow_calls).method == "torch"
    assert estimate(1000, 1, 4, machine=slow_calls).method == "blelloch"
    assert set(MACHINES) == {"cpu", "cuda"}


def test_wrong_numbers_are_refused() -> None:
    for call in (lambda: count(0, 2), lambda: count(2, 2, method="x"), lambda: estimate(1, 0, 1)):  # type: ignore[arg-type]
        with pytest.raises(PenstockError, match="expected"):
            call()
