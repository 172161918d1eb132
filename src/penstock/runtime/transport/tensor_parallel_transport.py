"""Ranks of several processes each, seen as ranks: the transport between tensor-parallel stages.

Lane i of one rank speaks to lane i of the others. What crosses a cut is the same on all lanes of a rank, so each lane
sends one part of it, ``1/t`` of the elements, and the lanes of the receiving rank put it together over their own,
faster links: the scatter/gather optimization (section 4.5 of Narayanan's thesis, Stanford 2022; section 4.1 of
Megatron-LM, SC 2021). Gradients go back in the same way.

Laws of this file:
  1. Parts are put together where a message is waited for, on the computing thread. All lanes of a rank wait for the
     same messages in the same order, which is their program's, whatever order the parts arrive in.
  2. What may be read at any time, by one lane alone, goes whole: reports, and buffers.
  3. That a tensor is the same on all lanes is not assumed but looked at, at the first message of a form.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.errors import PenstockError, TransportError
from penstock.runtime.transport.device_meshes import processes_of
from penstock.runtime.transport.transport import Edge, Forms, Message, PendingMessage, Transport
from penstock.runtime.transport.worlds import World

__all__ = ["TensorParallelTransport", "connect_tensor_parallel"]

_CUT = "stages"
"""The edges between neighbour stages."""
_CLOSE = 1e-3
"""Lanes that reduce alike differ by rounding, if at all. Parts of a tensor differ by as much as its elements do."""

_Shapes = tuple[torch.Size | None, ...]


def connect_tensor_parallel(
    world: World,
    edges: Iterable[Edge],
    device: torch.device,
    timeout_seconds: float,
    groups: Iterable[tuple[int, ...]],
    group: dist.ProcessGroup | None,
) -> Transport:
    """A transport between ranks of `lanes` processes each. Collective over all processes.

    `group`: the processes of this rank; None where a rank is one process.
    """
    if group is None:
        return world.connect(edges, device, timeout_seconds, tuple(groups))
    lanes = dist.get_world_size(group)
    all_edges = [_edge_of(edge, lane, lanes) for edge in edges for lane in range(lanes)]
    all_groups = [_group_of(ranks, lane, lanes) for ranks in groups for lane in range(lanes)]
    inner = world.connect(all_edges, device, timeout_seconds, tuple(all_groups))
    return TensorParallelTransport(inner, group, device)


def _edge_of(edge: Edge, lane: int, lanes: int) -> Edge:
    return Edge(processes_of(edge.source, lanes)[lane], processes_of(edge.target, lanes)[lane], edge.lane)


def _group_of(ranks: Sequence[int], lane: int, lanes: int) -> tuple[int, ...]:
    return tuple(processes_of(rank, lanes)[lane] for rank in ranks)


class TensorParallelTransport:
    """This process's lane of a rank; `group` are the processes of all its lanes, which compute on `device`, and `inner`
    speaks to processes.
    """

    def __init__(self, inner: Transport, group: dist.ProcessGroup, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._group = group
        self._lane = dist.get_rank(group)
        self._lanes = dist.get_world_size(group)
        self._sent: dict[tuple[Edge, Hashable], _Shapes] = {}
        self._shapes: dict[tuple[Edge, Hashable], _AgreedShapes] = {}
        self.sent_bytes = 0
        """What this lane has sent over cuts."""

    def begin(self) -> None:
        self._inner.begin()

    def ahead(self, edge: Edge) -> int:
        return self._inner.ahead(self._edge(edge))

    def overlaps(self) -> bool:
        return self._inner.overlaps()

    def send(self, edge: Edge, form: Hashable, message: Sequence[Tensor | None]) -> None:
        there = self._edge(edge)
        if edge.lane != _CUT:
            self._inner.send(there, form, message)
            return
        shapes = tuple(None if tensor is None else tensor.shape for tensor in message)
        agreed = self._sent.get((edge, form))
        if agreed is None:
            self._check(edge, message)
            self._sent[edge, form] = shapes
            self._inner.send(there, ("shapes", form), (_encoded(shapes).to(self._device),))
        elif agreed != shapes:
            raise TransportError(
                f"{edge}: microbatches of the same input shapes must make tensors of the same shapes. Agreed at the "
                f"first one: {agreed}; now: {shapes}. The model's shapes or used outputs depend on its data: make them "
                "depend on the input shapes only"
            )
        parts = [None if tensor is None else self._part(tensor) for tensor in message]
        self.sent_bytes += sum(part.numel() * part.element_size() for part in parts if part is not None)
        self._inner.send(there, form, parts)

    def post(self, edge: Edge, form: Hashable) -> PendingMessage:
        here = self._edge(edge)
        if edge.lane != _CUT:
            return self._inner.post(here, form)
        if (edge, form) not in self._shapes:
            self._shapes[edge, form] = _AgreedShapes(self._inner.post(here, ("shapes", form)))
        return _Parts(self._inner.post(here, form), self._shapes[edge, form], self._group, self._lanes)

    def agree(self, group: tuple[int, ...], rank: int, forms: Forms) -> None:
        own = processes_of(rank, self._lanes)[self._lane]
        self._inner.agree(_group_of(group, self._lane, self._lanes), own, forms)

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> PendingMessage:
        own = processes_of(rank, self._lanes)[self._lane]
        return self._inner.reduce(_group_of(group, self._lane, self._lanes), own, form, tensor)

    def check(self) -> None:
        self._inner.check()

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()

    def _edge(self, edge: Edge) -> Edge:
        return _edge_of(edge, self._lane, self._lanes)

    def _part(self, tensor: Tensor) -> Tensor:
        """This lane's part of all elements in a row; the parts of the last lanes are filled up with zeros."""
        flat = tensor.detach().reshape(-1)
        size = _part_size(flat.numel(), self._lanes)
        part = flat[self._lane * size : (self._lane + 1) * size]
        if part.numel() < size:
            part = torch.cat([part, part.new_zeros(size - part.numel())])
        return part.requires_grad_(tensor.requires_grad)

    def _check(self, edge: Edge, message: Sequence[Tensor | None]) -> None:
        """Raises `PenstockError`, on all lanes, if a tensor of `message` is not the same on all of them."""
        for tensor in message:
            if isinstance(tensor, DTensor):
                raise PenstockError(
                    f"a DTensor ({', '.join(map(str, tensor.placements))} over {tensor.device_mesh.mesh_dim_names}) is "
                    f"to cross the cut {edge}: expected a plain tensor that is the same on all lanes. End the stage "
                    "with a layer whose parallel style has output_layouts=Replicate() and use_local_output=True"
                )
        mine = torch.stack([_fingerprint(tensor) for tensor in message]) if message else torch.zeros(0, 4)
        mine = mine.to(next((tensor.device for tensor in message if tensor is not None), torch.device("cpu")))
        found = [torch.empty_like(mine) for _ in range(self._lanes)]
        dist.all_gather(found, mine, group=self._group)
        for lane, other in enumerate(found):
            for index, (one, another) in enumerate(zip(found[0].tolist(), other.tolist(), strict=True)):
                if not _alike(one, another):
                    raise PenstockError(
                        f"tensor {index} of what crosses the cut {edge} is not the same on lanes 0 and {lane}: "
                        "expected the same numbers on all lanes of a rank, of which each sends a part. Let the stage "
                        "before the cut end with a replicated tensor: a row-wise split after a column-wise one, or "
                        "output_layouts=Replicate(); for gradients, let the stage behind it begin with a layer whose "
                        "parallel style takes input_layouts=Replicate()"
                    )


@dataclass(slots=True, eq=False)
class _AgreedShapes:
    """The whole shapes of the messages of one form, which travel ahead of the first one."""

    ticket: PendingMessage
    shapes: _Shapes | None = None

    def get(self) -> _Shapes:
        if self.shapes is None:
            (code,) = self.ticket.wait()
            assert code is not None
            self.shapes = _decoded(code)
        return self.shapes


@dataclass(slots=True, eq=False)
class _Parts:
    """A message of which each lane receives a part."""

    ticket: PendingMessage
    agreed: _AgreedShapes
    group: dist.ProcessGroup
    lanes: int

    def ready(self) -> bool:
        return self.ticket.ready()

    def wait(self) -> Message:
        shapes, parts = self.agreed.get(), self.ticket.wait()
        return tuple(
            None if part is None or shape is None else self._gather(part, shape)
            for part, shape in zip(parts, shapes, strict=True)
        )

    def _gather(self, part: Tensor, shape: torch.Size) -> Tensor:
        # As bytes: not every type of numbers can be gathered everywhere.
        own = part.detach().view(torch.uint8)
        every = own.new_empty(self.lanes * own.numel())
        dist.all_gather(list(every.chunk(self.lanes)), own, group=self.group)
        whole = every.view(part.dtype)[: shape.numel()].view(shape)
        return whole.requires_grad_(part.requires_grad)


def _part_size(elements: int, lanes: int) -> int:
    return -(-elements // lanes)


def _encoded(shapes: _Shapes) -> Tensor:
    """For every tensor the number of its dimensions and their sizes; -1 where there is none."""
    numbers: list[int] = []
    for shape in shapes:
        numbers += [-1] if shape is None else [len(shape), *shape]
    return torch.tensor(numbers, dtype=torch.int64)


def _decoded(code: Tensor) -> _Shapes:
    numbers, shapes = iter(code.tolist()), []
    for count in numbers:
        shapes.append(None if count < 0 else torch.Size([next(numbers) for _ in range(count)]))
    return tuple(shapes)


def _fingerprint(tensor: Tensor | None) -> Tensor:
    """Four numbers that tell two tensors apart: how many elements there are, and three sums of them."""
    if tensor is None:
        return torch.full((4,), -1.0, dtype=torch.float64)
    values = tensor.detach().reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    values = values.to(torch.float64)
    ramp = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype, device=values.device)
    numbers = [values.new_tensor(float(tensor.numel())), values.sum(), values.abs().sum(), (values * ramp).sum()]
    return torch.stack(numbers)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    if one[0] != other[0]:
        return False
    size = max(abs(one[2]), abs(other[2]))
    if not math.isfinite(size):
        # Overflow is not for a transport to judge.
        return True
    return all(abs(a - b) <= _CLOSE * size for a, b in zip(one[1:], other[1:], strict=True))
