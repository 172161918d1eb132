"""Codecs keep their laws, and `wire_dtype=` says what it takes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock import PenstockError, RowInt8, WireCodec
from penstock.training.wire_codecs import read_wire_dtype, round_to_wire, sent_bytes

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
CODECS = [torch.bfloat16, torch.float16, torch.float32, RowInt8()]


def codec_of(kind):
    codec = read_wire_dtype(kind)
    assert codec is not None
    return codec


def rounded(kind, tensor):
    return round_to_wire(codec_of(kind), tensor)


@st.composite
def tensors(draw):
    """Tensors of any size of numbers, with rows of zeros, in any order of memory."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0 ** draw(st.integers(-50, 50))
    if draw(st.booleans()):
        numbers = numbers * torch.rand([*shape[:-1], 1] if shape else [], generator=generator).lt(0.7)
    order = draw(st.permutations(range(len(shape))))
    back = sorted(range(len(order)), key=order.__getitem__)
    return numbers.to(draw(st.sampled_from(FLOATS))).permute(order).contiguous().permute(back)


@given(tensors(), st.sampled_from(CODECS))
def test_rounding_a_rounded_tensor_changes_nothing(tensor, kind):
    once = rounded(kind, tensor)

    assert torch.equal(rounded(kind, once).nan_to_num(), once.nan_to_num())


@given(tensors(), st.sampled_from(CODECS))
def test_samples_are_coded_one_by_one(tensor, kind):
    if tensor.ndim:
        apart = torch.cat([rounded(kind, row) for row in tensor.split(1)])

        assert torch.equal(apart.nan_to_num(), rounded(kind, tensor).nan_to_num())


@given(tensors(), st.sampled_from(CODECS))
def test_a_tensor_keeps_its_shape_type_and_order_in_memory(tensor, kind):
    found = rounded(kind, tensor)

    assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
    assert [s for s, n in zip(found.stride(), found.shape, strict=True) if n > 1] == [
        s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1
    ]


@given(tensors(), st.sampled_from(CODECS), st.sampled_from([math.inf, -math.inf, math.nan]))
def test_what_is_not_finite_stays_so(tensor, kind, wrong):
    if tensor.numel():
        tensor[(-1,) * tensor.ndim] = wrong
        found = rounded(kind, tensor)

        assert not found[~tensor.isfinite()].isfinite().any()


@given(tensors(), st.sampled_from(CODECS))
def test_what_is_sent_has_the_bytes_that_the_codec_says(tensor, kind):
    codec = codec_of(kind)
    size = codec.sent_bytes(tensor.shape, tensor.dtype)

    if sent_bytes(codec, tensor.shape, tensor.dtype) < tensor.nbytes:
        assert (
            sum(part.nbytes for part in codec.encode(tensor)) == size == sent_bytes(codec, tensor.shape, tensor.dtype)
        )
    else:
        assert torch.equal(round_to_wire(codec, tensor).nan_to_num(), tensor.nan_to_num())


def test_rows_of_integers_by_hand():
    tensor = torch.tensor([[127.0, 63.5, -1.0, 0.4], [0.0, 0.0, 0.0, 0.0], [1.0, -0.5, 2**-8, 1 / 3]])
    numbers, exponents = RowInt8().encode(tensor)

    assert numbers.tolist() == [[127, 64, -1, 0], [0, 0, 0, 0], [64, -32, 0, 21]]
    assert exponents.flatten().tolist() == [7, 0, 1]
    assert RowInt8().decode((numbers, exponents), torch.float32)[2].tolist() == [1.0, -0.5, 0.0, 21 / 64]


@given(tensors())
def test_rows_of_integers_are_near(tensor):
    if tensor.ndim > 1 and tensor.dtype != torch.float16:
        found = rounded(RowInt8(), tensor).double()
        largest = tensor.double().abs().amax(-1, keepdim=True)
        normal = (largest > 2.0**-100) & largest.isfinite()

        assert bool((((found - tensor.double()).abs() <= largest / 128) | ~normal).all())


def test_integers_and_narrow_tensors_are_sent_as_they_are():
    codec = codec_of(torch.bfloat16)
    for tensor in (torch.arange(5), torch.ones(5) > 0, torch.ones(5, dtype=torch.float16), torch.ones(3) * 1j):
        assert sent_bytes(codec, tensor.shape, tensor.dtype) == tensor.nbytes
        assert torch.equal(round_to_wire(codec, tensor), tensor)


def test_rounding_keeps_the_wish_for_a_gradient():
    for kind in CODECS:
        for wants in (False, True):
            given = torch.ones(2, 3, dtype=torch.float64, requires_grad=wants)
            found = rounded(kind, given * 1.0)

            assert (found.requires_grad, found.grad_fn) == (wants, None)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (torch.float64, "no tensor of a model has more bytes"),
        (torch.int8, r"penstock.RowInt8\(\) sends integers"),
        (RowInt8, r"make one of the class: RowInt8\(\)"),
        ("bfloat16", "give torch.bfloat16"),
    ],
)
def test_other_values_are_refused(given, advice):
    with pytest.raises(PenstockError, match=f"wire_dtype: expected torch.bfloat16, .*found .*{advice}"):
        read_wire_dtype(given)


class Wrong(WireCodec):
    """Returns what it was made with."""

    def __init__(self, size=1, parts=None, tensor=None):
        self.size, self.parts, self.tensor = size, parts, tensor

    def encode(self, tensor):
        return self.parts

    def decode(self, parts, dtype):
        return self.tensor

    def sent_bytes(self, shape, dtype):
        return self.size


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (Wrong(size=-1), "what sent_bytes returns: expected a whole number, 0 or more, found -1"),
        (Wrong(size=None), "what sent_bytes returns: expected a whole number, 0 or more, found nothing"),
        (Wrong(size="8"), "what sent_bytes returns: expected a whole number, 0 or more, found '8'"),
        (Wrong(), "encode returns a tuple of tensors, found nothing"),
        (Wrong(parts=("a",)), "encode returns a tuple of tensors, found ('a',)"),
        (Wrong(parts=torch.ones(3)), "encode returns a tuple of tensors, found tensor"),
        (Wrong(parts=(torch.ones(3),), tensor="a"), "of shape (8,) and torch.float32, found 'a'"),
        (Wrong(parts=(torch.ones(3),), tensor=torch.ones(2, 4)), "of shape (8,) and torch.float32, found (2, 4)"),
    ],
)
def test_what_a_codec_returns_is_checked(codec, text):
    with pytest.raises(PenstockError) as caught:
        round_to_wire(codec, torch.ones(8))
    assert text in str(caught.value)
