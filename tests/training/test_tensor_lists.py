"""Arithmetic on many tensors in few calls has the bits of that on one after the other."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.runtime.parameters.gradient_norms import clip, divide, multiply, norms_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
MAKERS: dict[str, Callable[[torch.Generator, torch.dtype], Tensor]] = {
    "row": lambda generator, dtype: _random(generator, 37).to(dtype),
    "matrix": lambda generator, dtype: _random(generator, 7, 13).to(dtype),
    "transposed": lambda generator, dtype: _random(generator, 7, 13).to(dtype).t(),
    "with gaps": lambda generator, dtype: _random(generator, 20, 6).to(dtype)[::3, 1:5],
    "no dimension": lambda generator, dtype: _random(generator).to(dtype),
    "empty": lambda generator, dtype: _random(generator, 0, 3).to(dtype),
    "large": lambda generator, dtype: _random(generator, 70_001).to(dtype),
    "infinite": lambda generator, dtype: torch.cat([_random(generator, 5), torch.tensor([math.inf])]).to(dtype),
    "not a number": lambda generator, dtype: torch.cat([_random(generator, 5), torch.tensor([math.nan])]).to(dtype),
}


def _random(generator: torch.Generator, *sizes: int) -> Tensor:
    """Numbers of very different sizes."""
    magnitudes = 10.0 ** torch.randint(-6, 7, sizes, generator=generator, dtype=torch.float64)
    return torch.randn(sizes, generator=generator, dtype=torch.float64) * magnitudes


LISTS = st.lists(st.tuples(st.sampled_from(sorted(MAKERS)), st.sampled_from(DTYPES)), max_size=12)


def made(list_: list[tuple[str, torch.dtype]], seed: int) -> list[Tensor]:
    """Tensors of these kinds, in memory of their own."""
    generator = torch.Generator().manual_seed(seed)
    return [MAKERS[name](generator, dtype) for name, dtype in list_]


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    """All that tells two tensors apart; one NaN is as good as another."""
    if tensor.is_sparse:
        return bits(tensor.coalesce().values())
    settled = torch.where(tensor.isnan(), torch.full((), math.nan, dtype=tensor.dtype), tensor)
    return tensor.dtype, tensor.shape, settled.contiguous().view(-1).view(torch.uint8).tolist()


@given(LISTS, st.integers(0, 2**32))
def test_norms_have_the_bits_of_one_after_the_other(list_: list[tuple[str, torch.dtype]], seed: int) -> None:
    tensors = made(list_, seed)
    expected = [torch.linalg.vector_norm(tensor).double() for tensor in tensors]

    assert [bits(norm) for norm in norms_of(tensors)] == [bits(norm) for norm in expected]


@given(LISTS, st.integers(0, 2**32), st.sampled_from(DTYPES), st.floats(1e-6, 1.0))
def test_products_have_the_bits_of_one_after_the_other(
    list_: list[tuple[str, torch.dtype]], seed: int, dtype: torch.dtype, number: float
) -> None:
    factor, tensors = torch.tensor(number, dtype=dtype), made(list_, seed)
    # One without a dimension would take the type of the factor.
    expected = [(tensor * factor).to(tensor.dtype) for tensor in tensors]
    multiply(tensors, factor)

    assert [bits(tensor) for tensor in tensors] == [bits(tensor) for tensor in expected]


@given(LISTS, st.integers(0, 2**32), st.one_of(st.integers(2, 100), st.floats(1e-3, 2.0**24)))
def test_quotients_have_the_bits_of_one_after_the_other(
    list_: list[tuple[str, torch.dtype]], seed: int, number: float
) -> None:
    tensors = made(list_, seed)
    expected = [tensor / number for tensor in tensors]
    in_place = [tensor.clone().div_(number) for tensor in tensors]
    divide(tensors, number)

    assert [bits(tensor) for tensor in tensors] == [bits(tensor) for tensor in expected]
    assert [bits(tensor) for tensor in tensors] == [bits(tensor) for tensor in in_place]


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_gpus_multiply_by_the_reciprocal_its_rounding_is_theirs(dtype: torch.dtype) -> None:
    """A GPU takes it in the type that it computes in; here it is taken in float64 and rounded then."""
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    for number in range(1, 5_000):
        assert torch.tensor(1 / number, dtype=kind) == torch.ones((), dtype=kind) / number


def sparse() -> Tensor:
    words = nn.Embedding(5, 3, sparse=True)
    words(torch.tensor([1, 1, 2])).sum().backward()
    assert words.weight.grad is not None and words.weight.grad.is_sparse
    return words.weight.grad


def test_sparse_gradients_are_divided_and_multiplied_among_others() -> None:
    one, factor = sparse(), torch.tensor(0.3)
    expected = [bits(one / 3 * factor), bits(torch.ones(4) / 3 * factor)]
    tensors = [one, torch.ones(4)]
    divide(tensors, 3)
    multiply(tensors, factor)

    assert [bits(one), bits(tensors[1])] == expected


def test_what_lies_in_the_same_place_is_changed_once() -> None:
    """Autograd gives both parameters views of one gradient."""
    one, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2, 2))
    (one.view(-1) + other.view(-1)).mul(6.0).sum().backward()
    assert one.grad is not None and other.grad is not None and one.grad.data_ptr() == other.grad.data_ptr()
    divide([one.grad, other.grad], 3)
    multiply([one.grad, other.grad], torch.tensor(0.5))

    assert one.grad.tolist() == [1.0] * 4 and other.grad.tolist() == [[1.0] * 2] * 2


@pytest.mark.parametrize("most", [0.5, 1e6])
def test_clipping_is_pytorchs_and_takes_no_other_tensors(most: float) -> None:
    parameters = [nn.Parameter(torch.zeros(sizes)) for sizes in ((4, 5), (3,), ())]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.ndim))
    own = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    before = [tensor.data_ptr() for tensor in own]
    total = torch.nn.utils.clip_grad_norm_(parameters, most)
    clip(own, most, total)

    assert [bits(tensor) for tensor in own] == [bits(p.grad) for p in parameters if p.grad is not None]
    assert [tensor.data_ptr() for tensor in own] == before
