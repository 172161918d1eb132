"""Messages: in order, in full, and agreed on once."""

import pytest
import torch

from penstock.runtime.transport import Edge, Loopback
from processes import Pool
from transport_jobs import exchange, exchange_changed_shapes, exchange_layouts, in_layouts


def test_loopback_keeps_the_order_of_an_edge() -> None:
    transport = Loopback()
    edge, back = Edge(0, 1), Edge(1, 0)
    early = transport.post(edge, "form")
    late = transport.post(edge, "form")

    assert not early.ready()
    transport.send(edge, "form", (torch.tensor(1.0),))
    assert early.ready() and not late.ready()
    transport.send(edge, "form", (torch.tensor(2.0), None))
    transport.send(back, "form", (torch.tensor(3.0),))
    assert [part if part is None else part.item() for part in late.wait()] == [2.0, None]
    assert [part.item() for part in early.wait()] == [1.0]
    assert [part.item() for part in transport.post(back, "form").wait()] == [3.0]


def test_loopback_cuts_the_graph_and_keeps_who_needs_gradients() -> None:
    transport = Loopback()
    leaf = torch.ones(2, requires_grad=True)
    transport.send(Edge(0, 1), "form", (leaf * 2, torch.ones(2)))
    needs, does_not = transport.post(Edge(0, 1), "form").wait()

    assert needs.requires_grad and needs.is_leaf
    assert not does_not.requires_grad


@pytest.mark.parametrize("ranks", [2, 3])
def test_processes_exchange_what_was_sent(pool: Pool, ranks: int) -> None:
    for rank, found in enumerate(pool.run(ranks, exchange)):
        source = (rank - 1) % ranks

        assert found == [
            ([source, 0, "torch.int64", False], None, [0.5, "torch.float32", True]),
            ([source, 1, "torch.int64", False], None, [1.5, "torch.float32", True]),
            ([source, 2, "torch.bfloat16", False], [[], "torch.float64", False]),
            ([source, 3, "torch.int64", False], None, [3.5, "torch.float32", True]),
        ]


def test_tensors_lie_in_memory_as_they_did(pool: Pool) -> None:
    _, found = pool.run(2, exchange_layouts)
    sent = in_layouts()

    assert len({tensor.stride() for tensor in sent}) == 4
    assert len(found) == 2 * len(sent)
    for index, (tensor, strides) in enumerate(found):
        one = sent[index % len(sent)]
        assert torch.equal(tensor, one)
        # A layer makes its results in the order of its input, without the gaps.
        assert strides == torch.empty_like(one).stride()


def test_shapes_that_depend_on_the_data_are_refused(pool: Pool) -> None:
    sender, _ = pool.run(2, exchange_changed_shapes)

    assert sender == (
        "rank 0 -> rank 1 (stages): microbatches of the same input shapes must make tensors of the same shapes. "
        "Agreed at "
        "the first one: [(2,) torch.float32]; now: [(3,) torch.float32]. The model's shapes or used outputs depend on "
        "its "
        "data: make them depend on the input shapes only"
    )
