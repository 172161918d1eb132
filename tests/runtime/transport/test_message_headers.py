"""A header is read as what it says, or refused: no text of it can make the receiver allocate, hang or crash."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from penstock.errors import TransportError
from penstock.runtime.collectives.failures import FailureBoard
from penstock.runtime.collectives.store_gathers import StoreGather
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.files.plain_values import encode_plain
from penstock.runtime.transport.message_headers import (
    ReceivedKinds,
    SentKinds,
    Spec,
    Specs,
    assemble,
    parse_specs,
    write_specs,
)
from penstock.runtime.transport.ordered_all_reduce import Agreement
from penstock.runtime.transport.transport import Edge

EDGE = Edge(0, 1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.float8_e5m2]


@st.composite
def specs(draw: st.DrawFn) -> Specs:
    """The tensors of a message."""
    found: list[Spec | None] = []
    for _ in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 6), max_size=5))
        dtype = draw(st.sampled_from(DTYPES))
        differentiable = dtype.is_floating_point or dtype.is_complex
        order = draw(st.permutations(range(len(shape))))
        strided = torch.empty([shape[dimension] for dimension in order], dtype=dtype, device="meta")
        tensor = strided.permute([order.index(dimension) for dimension in range(len(shape))])
        found.append(
            draw(st.sampled_from([None, Spec.of(tensor.requires_grad_(differentiable and draw(st.booleans())))]))
        )
    return tuple(found)


def everything(of: Specs) -> list[object]:
    """All that a spec says, also what its equality leaves out."""
    return [
        None if spec is None else (spec.shape, spec.dtype, spec.requires_grad, spec.order, spec.strides, spec.nbytes)
        for spec in of
    ]


@given(specs())
def test_a_header_is_read_as_it_was_written(sent: Specs) -> None:
    read = parse_specs(write_specs(sent, EDGE), EDGE)

    assert everything(read) == everything(sent)
    for spec in read:
        if spec is not None:
            made = spec.empty()
            assert (made.shape, made.stride()) == (spec.shape, spec.strides)


def test_a_tensor_without_numbers_has_the_strides_that_pytorch_gives_it() -> None:
    assert Spec.of(torch.empty(2, 0, 3)).strides == torch.empty(2, 0, 3).stride()


def test_what_a_view_conjugates_or_negates_travels_computed() -> None:
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    for view in (numbers.conj(), numbers.conj().imag):
        travelling = Spec.of(view).flatten(view)

        assert not travelling.is_conj() and not travelling.is_neg()
        assert torch.equal(travelling, view)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([torch.float32, torch.Size([2]), "float"]),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=12,
)
ROWS = st.tuples(
    st.lists(st.integers(-2, 2**60), max_size=3).map(torch.Size) | VALUES,
    st.sampled_from([torch.float32, torch.int8, torch.qint8]) | VALUES,
    st.booleans() | VALUES,
    st.permutations(range(2)).map(tuple) | VALUES,
)
DAMAGED = st.builds(
    lambda text, position, byte: text[: position % len(text)] + bytes([byte]) + text[position % len(text) + 1 :],
    specs().map(lambda sent: write_specs(sent, EDGE)),
    st.integers(0, 2**16),
    st.integers(0, 255),
)


@given(st.one_of(st.binary(max_size=80), (VALUES | st.lists(ROWS, max_size=3)).map(encode_plain), DAMAGED))
def test_every_text_is_a_header_or_refused(text: bytes) -> None:
    try:
        read = parse_specs(text, EDGE)
    except TransportError as error:
        assert str(error).startswith("rank 0 -> rank 1 (stages): expected a header with the shapes of a message's")
    else:
        assert everything(parse_specs(write_specs(read, EDGE), EDGE)) == everything(read)


def of_one(
    dtype: object = torch.float32,
    gradient: object = False,
    sizes: tuple[int, ...] = (2, 3),
    order: tuple[Any, ...] = (0, 1),
) -> bytes:
    return encode_plain([(torch.Size(sizes), dtype, gradient, order)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (of_one(sizes=(2**31, 2**31)), "a tensor of (2147483648, 2147483648) numbers of torch.float32"),
        (of_one(sizes=(2**62, 0)), "a tensor of (4611686018427387904, 0) numbers"),
        (of_one(sizes=(-1, 3)), "a tensor of (-1, 3) numbers"),
        (of_one(order=(1, 1)), "(1, 1) as the order of 2 dimensions in memory"),
        (of_one(order=(0, 1.0)), "(0, 1.0) as the order of 2 dimensions in memory"),
        (of_one(order=("a", 1)), "not supported between instances"),
        (of_one(dtype=200), "200 and (0, 1) as shape, dtype and order of a tensor"),
        (of_one(dtype=torch.qint8), "a tensor of torch.qint8"),
        (of_one(gradient=7), "gradient flag 7"),
        (of_one(dtype=torch.int64, gradient=True), "a gradient of torch.int64"),
        (of_one(sizes=(1,) * 65, order=tuple(range(65))), "65 dimensions"),
        (of_one() + b"more", "cannot be read"),
        (of_one().replace(b"[2, 3]", b"[2.5, 3]"), "cannot be read"),
        (of_one().replace(b"[2, 3]", b"[%d, 3]" % 2**70), "numbers of torch.float32, on a host of"),
        (encode_plain([(torch.Size([2]), torch.float32, False)]), "missing 1 required positional argument"),
        (encode_plain(3), "not iterable"),
        (b"", "found 0 bytes that are none"),
    ],
)
def test_bounds_are_checked_before_anything_is_allocated(text: bytes, found: str) -> None:
    assert len(parse_specs(of_one(), EDGE)) == 1
    with pytest.raises(TransportError) as caught:
        parse_specs(text, EDGE)

    assert found in str(caught.value)


def test_many_tensors_that_fit_one_by_one_are_refused_together() -> None:
    half = torch.empty(memory_of_this_host() // 8 + 1, dtype=torch.float32, device="meta")
    with pytest.raises(TransportError, match="bytes together, on a host of"):
        parse_specs(write_specs((Spec.of(half), Spec.of(half)), EDGE), EDGE)


def memory_of_this_host() -> int:
    """The memory of this host, in bytes, as its kernel counts it."""
    with open("/proc/meminfo") as file:
        return int(next(line for line in file if line.startswith("MemTotal")).split()[1]) * 1024


def test_what_cannot_be_sent_is_refused_by_its_sender() -> None:
    kinds = SentKinds(EDGE)
    with pytest.raises(TransportError, match=r"a tensor of torch\.bits16 cannot be sent: expected numbers"):
        kinds.agree("kind", (torch.empty(2, dtype=torch.bits16),))
    header, _ = kinds.agree("kind", (torch.zeros(2),))

    assert header is not None, "a refused message has agreed on nothing"


def header_of() -> bytes:
    header, _ = SentKinds(EDGE).agree("kind", (torch.zeros(2, 3),))
    assert header is not None
    return header


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(header_of().replace(b"float32", b"float99"), id="changed on its way"),
        pytest.param(torch.full((9,), 0.5).numpy().tobytes(), id="the numbers of a message"),
        pytest.param(bytes(4096), id="zeros"),
    ],
)
def test_what_is_no_header_is_refused_and_agrees_on_nothing(header: bytes) -> None:
    received = ReceivedKinds(EDGE)
    with pytest.raises(
        TransportError, match=r"rank 0 -> rank 1.*: expected a header .* the ranks make different calls"
    ):
        received.read("kind", header)
    assert received.specs("kind") is None

    assert received.read("kind", header_of()) == (Spec.of(torch.zeros(2, 3)),)
    assert received.specs("kind") is not None


@pytest.mark.parametrize(
    "text",
    [b"", b"no JSON", b"3", b'["a"]', b'[["kind", 3]]', b'[["kind", "many", "torch.float32"]]', b'{"set": [[]]}'],
)
def test_an_agreement_on_sums_is_parsed(text: bytes) -> None:
    store = HashStore()
    board = FailureBoard(store, 0, 2)
    agreement = Agreement(StoreGather("sum ", 0, (0, 1), Timeout(board, 30.0)))
    store.set("sum gather 0/1", f"={text.decode()}")
    with pytest.raises(TransportError, match=r"sum different things .* rank 1: |cannot be read"):
        agreement.agree({"kind": (3, torch.float32)})
    board.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 2)])
def test_a_missing_gradient_arrives_as_none(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    kinds = SentKinds(EDGE)
    there = torch.full(shape, torch.nan, dtype=dtype)
    for gradient in (there.to("meta"), there, there.to("meta")):
        _, tensors = kinds.agree("kind", (gradient,))
        (found,) = assemble((Spec.of(gradient),), tensors)

        assert (found is None) == (gradient.is_meta and there.numel() > 0)


def test_a_tensor_that_requires_a_gradient_against_the_agreement_is_refused_with_the_difference() -> None:
    kinds = SentKinds(EDGE)
    plain = torch.zeros(2)
    kinds.agree("kind", (plain.clone().requires_grad_(),))
    kinds.agree("kind", (plain,))
    kinds.agree("other", (plain,))
    with pytest.raises(
        TransportError, match=r"Agreed at the first one: \[\(2,\) torch.float32\]; now: .* with a gradient\]"
    ):
        kinds.agree("other", (plain.clone().requires_grad_(),))


@pytest.mark.parametrize("length", [1, 3])
def test_a_message_of_another_length_is_refused(length: int) -> None:
    kinds = SentKinds(EDGE)
    message = (torch.zeros(2), None, None)
    kinds.agree("kind", message[:2])
    with pytest.raises(TransportError, match="must make tensors of the same shapes"):
        kinds.agree("kind", message[:length])


def test_a_device_that_is_not_read_on_the_host_refuses_a_missing_gradient() -> None:
    kinds = SentKinds(EDGE, on_host=False)
    kinds.agree("kind", (torch.zeros(2),))
    with pytest.raises(TransportError, match=r"now: \[none\]"):
        kinds.agree("kind", (torch.empty(2, device="meta"),))
