"""The transport between tensor-parallel stages: each rank of the schedule consists of several processes.

Tensor-parallel rank i of one rank sends to tensor-parallel rank i of others. A tensor between stages is the same on all
t tensor-parallel ranks, so each of them sends one slice, ``1/t`` of the elements. The receiving processes gather the
slices over their own, faster links. This is the scatter/gather optimization of [Narayanan 2021, section 4.5] and [PTD-P
2021, section 4.1]. Gradients are sent back in the same way.

With a tensor-parallel size of t, process p is tensor-parallel rank ``p % t`` of the schedule's rank ``p // t``. The
processes of one stage form a `DeviceMesh`: replicas along ``dp``, tensor-parallel ranks along ``tp``. If all stages
have equally many replicas, it is a slice of one mesh of all processes, (``pp``, ``dp``, ``tp``). The stages that a rank
holds under `interleaved` then have one index along ``pp``. Otherwise there is no such block, and every stage has a mesh
of its own.

Invariants of this file:
  1. Slices are gathered on the computing thread, when it waits for their message. All tensor-parallel ranks of a rank
     wait for the same messages in the order of their program, in whatever order the slices arrive.
  2. Reports and buffers are sent whole, since a single tensor-parallel rank may read them, and at any time.
  3. The first message of each kind is checked: its tensors must be the same on all tensor-parallel ranks.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PenstockError, TransportError
from penstock.runtime.transport.message_headers import Awaited, Specs, SpecsAhead
from penstock.runtime.transport.transport import Channel, Edge, Message, PendingMessage, SumKinds, Transport
from penstock.runtime.transport.worlds import World
from penstock.torch_internals.distributed import gather_into
from penstock.torch_internals.unimported import is_dtensor

_CLOSE = 1e-3
"""The allowed relative difference between tensor-parallel ranks. Replicated tensors differ by rounding at most. Slices
of one tensor differ as much as its elements do.
"""


def processes_of(rank: int, tensor_parallel_size: int) -> range:
    """The processes that form the schedule's rank `rank`."""
    return range(rank * tensor_parallel_size, (rank + 1) * tensor_parallel_size)


def stage_mesh(
    stages: Iterable[tuple[int, ...]],
    rank: int,
    tensor_parallel_size: int,
    device: torch.device,
    timeout_seconds: float,
) -> DeviceMesh:
    """Makes the mesh (``dp``, ``tp``) of the stages on the schedule's rank `rank`, with `timeout_seconds` for its
    collectives. `stages`: the ranks of each. Collective over all processes.
    """
    groups = list(dict.fromkeys(stages))
    blocks = [[list(processes_of(replica, tensor_parallel_size)) for replica in group] for group in groups]
    if len({len(group) for group in groups}) == 1:
        mesh = DeviceMesh(device.type, torch.tensor(blocks), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    else:
        # Making a mesh makes process groups, which all processes must do together and in one order.
        meshes = [DeviceMesh(device.type, torch.tensor(block), mesh_dim_names=("dp", "tp")) for block in blocks]
        (mesh,) = [made for made, group in zip(meshes, groups, strict=True) if rank in group]
    for process_group in mesh.get_all_groups():
        # A mesh has no timeout parameter (torch 2.11 to 2.13), and the default group's timeout may be half an hour.
        process_group.set_timeout(timedelta(seconds=timeout_seconds))
    return mesh


def connect_tensor_parallel(
    world: World,
    edges: Iterable[Edge],
    device: torch.device,
    timeout_seconds: float,
    groups: Iterable[tuple[int, ...]],
    tp_group: dist.ProcessGroup | None,
    mesh_groups: Sequence[dist.ProcessGroup] = (),
) -> Transport:
    """Makes a transport between ranks of one or more processes each. All processes must call it.

    `tp_group`: the processes of this rank; None if a rank is one process. `mesh_groups`: those in which its layers
    communicate.
    """
    if tp_group is None:
        return world.connect(edges, device, timeout_seconds, tuple(groups), mesh_groups=mesh_groups)
    size = dist.get_world_size(tp_group)
    all_edges = [_edge_of(edge, tp_rank, size) for edge in edges for tp_rank in range(size)]
    all_groups = [_group_of(ranks, tp_rank, size) for ranks in groups for tp_rank in range(size)]
    members = dist.get_process_group_ranks(tp_group)
    inner = world.connect(
        all_edges, device, timeout_seconds, tuple(all_groups), mesh_groups=mesh_groups, members=members
    )
    return TensorParallelTransport(inner, tp_group, device)


def _edge_of(edge: Edge, tp_rank: int, size: int) -> Edge:
    return Edge(processes_of(edge.source, size)[tp_rank], processes_of(edge.target, size)[tp_rank], edge.channel)


def _group_of(ranks: Sequence[int], tp_rank: int, size: int) -> tuple[int, ...]:
    return tuple(processes_of(rank, size)[tp_rank] for rank in ranks)


class TensorParallelTransport:
    """Carries the messages of one tensor-parallel rank, which computes on `device`.

    `tp_group`: all processes of the same rank. `inner` carries messages between processes.
    """

    def __init__(self, inner: Transport, tp_group: dist.ProcessGroup, device: torch.device) -> None:
        self._inner, self._device = inner, device
        self._tp_group = tp_group
        self._tp_rank = dist.get_rank(tp_group)
        self._size = dist.get_world_size(tp_group)
        self._specs = SpecsAhead(inner, device, lambda specs, edge: specs)
        """Of whole tensors; the transport between processes describes slices."""
        self.sent_bytes = 0
        """The bytes that this process has sent between stages."""

    def begin_segment(self) -> None:
        self._inner.begin_segment()

    def ahead(self, edge: Edge) -> int:
        return self._inner.ahead(self._edge(edge))

    def overlaps(self) -> bool:
        return self._inner.overlaps()

    def send(self, edge: Edge, kind: Hashable, message: Sequence[Tensor | None]) -> None:
        there = self._edge(edge)
        if edge.channel != Channel.STAGES:
            self._inner.send(there, kind, message)
            return
        if self._specs.send(there, kind, message):
            self._check(edge, message)
        slices = [None if tensor is None else self._slice(tensor) for tensor in message]
        self.sent_bytes += sum(own.numel() * own.element_size() for own in slices if own is not None)
        self._inner.send(there, kind, slices)

    def post(self, edge: Edge, kind: Hashable) -> PendingMessage:
        here = self._edge(edge)
        if edge.channel != Channel.STAGES:
            return self._inner.post(here, kind)
        specs = self._specs.post(here, kind)
        return _SlicedMessage(self._inner.post(here, kind), specs, self._tp_group, self._size)

    def agree(self, group: tuple[int, ...], rank: int, kinds: SumKinds) -> None:
        own = processes_of(rank, self._size)[self._tp_rank]
        self._inner.agree(_group_of(group, self._tp_rank, self._size), own, kinds)

    def reduce(self, group: tuple[int, ...], rank: int, kind: Hashable, tensor: Tensor) -> PendingMessage:
        own = processes_of(rank, self._size)[self._tp_rank]
        return self._inner.reduce(_group_of(group, self._tp_rank, self._size), own, kind, tensor)

    def check(self) -> None:
        self._inner.check()

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()

    def _edge(self, edge: Edge) -> Edge:
        return _edge_of(edge, self._tp_rank, self._size)

    def _slice(self, tensor: Tensor) -> Tensor:
        """This process's slice of the flattened tensor. The slices of the last processes are padded with zeros."""
        flat = tensor.detach().reshape(-1)
        size = _slice_size(flat.numel(), self._size)
        own = flat[self._tp_rank * size : (self._tp_rank + 1) * size]
        if own.numel() < size:
            own = torch.cat([own, own.new_zeros(size - own.numel())])
        return own.requires_grad_(tensor.requires_grad)

    def _check(self, edge: Edge, message: Sequence[Tensor | None]) -> None:
        """Raises `PenstockError` on all tensor-parallel ranks unless the tensors of `message` are the same on all."""
        for tensor in message:
            if is_dtensor(tensor):
                raise PenstockError(
                    f"a DTensor ({', '.join(map(str, tensor.placements))} over {tensor.device_mesh.mesh_dim_names}) is "
                    f"to cross the cut {edge}: expected a plain tensor that is the same on all tensor-parallel "
                    "ranks. End the stage with a layer whose parallel style has output_layouts=Replicate() and "
                    "use_local_output=True"
                )
        mine = torch.zeros(len(message), 4, dtype=torch.float64, device=self._device)
        for row, tensor in zip(mine, message, strict=True):
            _write_fingerprint(tensor, row)
        gathered = mine.new_empty(self._size * len(message), 4)
        gather_into(self._tp_group, gathered, mine).wait()
        found = gathered.view(self._size, *mine.shape).tolist()
        for tp_rank, other in enumerate(found):
            for index, (one, another) in enumerate(zip(found[0], other, strict=True)):
                if not _alike(one, another):
                    raise PenstockError(
                        f"tensor {index} of what crosses the cut {edge} is not the same on tensor-parallel ranks "
                        f"0 and {tp_rank}: expected the same numbers on all of them, since each sends a slice. Let the "
                        "stage before the cut end with a replicated tensor: a row-wise split after a column-wise one, "
                        "or output_layouts=Replicate(); for gradients, let the stage behind it begin with a layer "
                        "whose parallel style takes input_layouts=Replicate()"
                    )


@dataclass(slots=True, eq=False)
class _SlicedMessage:
    """A message whose slices the tensor-parallel ranks receive and gather."""

    receive: PendingMessage
    specs: Awaited[Specs]
    tp_group: dist.ProcessGroup
    size: int

    def ready(self) -> bool:
        return self.receive.ready()

    def wait(self) -> Message:
        specs, slices = self.specs.get(), self.receive.wait()
        return tuple(
            None if own is None or spec is None else self._gather(own, spec.shape)
            for own, spec in zip(slices, specs, strict=True)
        )

    def _gather(self, own: Tensor, shape: torch.Size) -> Tensor:
        if _slice_size(math.prod(shape), self.size) != own.numel():
            raise TransportError(
                f"expected a slice of a tensor of shape {tuple(shape)} for {self.size} tensor-parallel ranks, found "
                f"{own.numel()} numbers. The ranks make different calls: call the same methods of the Pipeline on "
                "every rank, in the same order"
            )
        # The slices are gathered as bytes, since not every backend can gather every dtype.
        sent = own.detach().view(torch.uint8)
        gathered = sent.new_empty(self.size * sent.numel())
        gather_into(self.tp_group, gathered, sent).wait()
        whole = gathered.view(own.dtype)[: shape.numel()].view(shape)
        return whole.requires_grad_(own.requires_grad)


def _slice_size(elements: int, size: int) -> int:
    return -(-elements // size)


def _write_fingerprint(tensor: Tensor | None, row: Tensor) -> None:
    """Writes four numbers that identify a tensor into `row`: the number of its elements, and three sums over them."""
    if tensor is None or tensor.is_meta:
        row.fill_(-1.0)
        return
    values = tensor.detach().reshape(-1)
    values = torch.view_as_real(values).reshape(-1) if values.is_complex() else values
    values = values.to(torch.float64)
    ramp = torch.linspace(0.5, 1.5, values.numel(), dtype=values.dtype, device=values.device)
    row[0] = tensor.numel()
    torch.stack([values.sum(), values.abs().sum(), (values * ramp).sum()], out=row[1:])


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    if one[0] != other[0]:
        return False
    size = max(abs(one[2]), abs(other[2]))
    if not math.isfinite(size):
        # Overflow is no fault of the transport.
        return True
    return all(abs(a - b) <= _CLOSE * size for a, b in zip(one[1:], other[1:], strict=True))
