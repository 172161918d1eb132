"""What travels ahead of encoded messages is checked by the one that reads it."""

import pytest
import torch

from penstock.errors import TransportError
from penstock.runtime.engine.coded_messages import CodedMessages
from penstock.runtime.files.plain_values import encode_plain
from penstock.runtime.transport.transport import Edge, LoopbackTransport
from penstock.training.wire_codecs import RowInt8

EDGE = Edge(0, 1)
CPU = torch.device("cpu")


def coded() -> CodedMessages:
    return CodedMessages(LoopbackTransport(), RowInt8(), CPU)


def test_all_kinds_of_tensors_arrive_together() -> None:
    messages = coded()
    tensors = (
        torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(),
        None,
        torch.arange(3),
        torch.ones(2, 5, dtype=torch.float64).t(),
        torch.ones(4, requires_grad=True),
        torch.full((2, 2), torch.nan, dtype=torch.bfloat16),
    )
    passed = messages.pass_on(tensors)
    for _ in range(2):
        receive = messages.post(EDGE, "kind")
        messages.send(EDGE, "kind", tensors)
        assert receive.ready()
        for found, expected, given in zip(receive.wait(), passed, tensors, strict=True):
            if given is None or found is None or expected is None:
                assert found is expected is given is None
            else:
                assert torch.equal(found.nan_to_num(), expected.nan_to_num())
                assert (found.dtype, found.requires_grad) == (given.dtype, given.requires_grad)
                assert found.stride() == expected.stride() == given.stride()


SPEC = (torch.Size((4, 4)), torch.float32, True, (0, 1))


@pytest.mark.parametrize("specs", [2, [2], [SPEC[:3]], [SPEC, SPEC, SPEC], [SPEC, None, None], [None], [], b"{"])
def test_what_does_not_describe_a_message_is_refused(specs: object) -> None:
    """Also specs of more or fewer tensors than come."""
    messages = coded()
    receive = messages.post(EDGE, "kind")
    code = specs if isinstance(specs, bytes) else encode_plain(specs)
    ahead = torch.frombuffer(bytearray(code), dtype=torch.uint8)
    messages.transport.send(EDGE, ("specs", "kind"), (ahead,))
    messages.transport.send(EDGE, "kind", (torch.ones(4, 4, dtype=torch.int8), torch.ones(4, 1, dtype=torch.int16)))

    with pytest.raises(TransportError, match=r"rank 0 -> rank 1.*(found \d+ bytes that are none|codecs differ)"):
        receive.wait()


def test_shapes_that_change_are_refused() -> None:
    messages = coded()
    messages.send(EDGE, "kind", (torch.ones(2, 4),))
    with pytest.raises(TransportError, match=r"Agreed at the first one: \[\(2, 4\) .* now: \[\(3, 4\)"):
        messages.send(EDGE, "kind", (torch.ones(3, 4),))
