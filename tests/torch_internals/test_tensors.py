"""Tensors' private names: what each gives, and what stands in where it is gone."""

import pytest
import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.torch_internals.tensors import (
    copy_each,
    divide_each,
    multiply_each,
    norm_of_each,
    set_times_written,
    storage_key,
    storage_references,
    times_written,
)

ONE_BY_ONE = ("_foreach_norm", "_foreach_mul_", "_foreach_div_", "_foreach_copy_")


@pytest.fixture(params=["together", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the for-each functions, and without."""
    if request.param == "one by one":
        for name in ONE_BY_ONE:
            monkeypatch.delattr(torch, name)


@pytest.fixture
def gone() -> property:
    """An attribute that the class above has and this one does not."""

    def raises(owner: object) -> None:
        raise AttributeError("gone")

    return property(raises)


def numbers(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(size, 3, dtype=dtype) for size in (1, 7, 0, 300)]


def test_every_write_counts() -> None:
    tensor = torch.zeros(4)
    before = times_written(tensor)

    tensor.add_(1)
    tensor[1:].mul_(2)

    assert times_written(tensor) == before + 2
    assert times_written(tensor) == times_written(tensor.view(2, 2))


def test_a_count_that_is_set_is_what_autograd_compares() -> None:
    parameter, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    output = (parameter * x).sum()
    before = times_written(parameter)
    with torch.no_grad():
        parameter.mul_(3)
    set_times_written([parameter], [before])
    output.backward()  # type: ignore[no-untyped-call]

    assert times_written(parameter) == before
    assert x.grad is not None and x.grad.tolist() == [3, 3]


def test_a_count_of_inference_tensors_is_torchs_own_error() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(1)

    with pytest.raises(RuntimeError, match="do not track version"):
        times_written(tensor)


def test_no_count_is_an_error(gone: property, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "_version", gone, raising=False)

    with pytest.raises(PenstockError, match=r"has no torch\.Tensor\._version, .*: expected torch 2\.13, "):
        times_written(torch.zeros(1))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("private", [True, False])
def test_a_key_is_that_of_the_memory(
    device: str, private: bool, gone: property, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.zeros(4, device=device), torch.zeros(0, device=device), torch.zeros(4, device=device)]
    expected = [storage_key(tensor.untyped_storage()) for tensor in tensors]
    if not private:
        monkeypatch.setattr(torch.UntypedStorage, "_cdata", gone, raising=False)

    keys = [storage_key(tensor.untyped_storage()) for tensor in tensors]

    assert len(set(keys)) == 3
    assert keys == expected
    assert storage_key(tensors[0][1:].view(3, 1).untyped_storage()) == keys[0]


def test_every_tensor_of_a_storage_counts() -> None:
    tensor = torch.zeros(4).requires_grad_()
    others = [tensor.detach(), tensor.detach()[1:]]
    squares = tensor[:2].exp()
    weighed = others[0] * squares[0]

    assert storage_references(tensor.untyped_storage()) == 4, "autograd holds one"
    del weighed, others
    assert storage_references(tensor.untyped_storage()) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norms_have_the_bits_of_single_ones(way: None, dtype: torch.dtype) -> None:
    found = norm_of_each(numbers(dtype))

    assert [norm.dtype for norm in found] == [dtype] * 4
    assert all(
        torch.equal(norm, torch.linalg.vector_norm(each)) for norm, each in zip(found, numbers(dtype), strict=True)
    )


@pytest.mark.parametrize("factor", [torch.tensor(1 / 3, dtype=torch.float64), 1 / 3])
def test_products_and_quotients_have_the_bits_of_single_ones(way: None, factor: Tensor | float) -> None:
    multiplied, divided = numbers(), numbers()
    multiply_each(multiplied, factor)
    divide_each(divided, 3.0)

    for each, product, quotient in zip(numbers(), multiplied, divided, strict=True):
        assert torch.equal(product, each * factor)
        assert torch.equal(quotient, each / 3)


def test_copies_fill_the_targets(way: None) -> None:
    targets = [torch.zeros_like(each) for each in numbers()]
    memory = [target.data_ptr() for target in targets]

    copy_each(targets, numbers())

    assert all(torch.equal(own, each) for own, each in zip(targets, numbers(), strict=True))
    assert [target.data_ptr() for target in targets] == memory
