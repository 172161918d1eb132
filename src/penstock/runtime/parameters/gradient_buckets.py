"""Sums the gradients of a stage's replicas, bucket by bucket, while the backward that makes them still runs.

The bits of the sum are those of adding the replicas' gradients in replica order, on every replica: that is what makes a
replicated run repeatable, and equal to the oracle.

Laws of this file:
  1. Buckets are sent in one order on all replicas, whatever order autograd makes their gradients in.
  2. A gradient that no replica has stays absent, since an optimizer with momentum or weight decay would step a zero.
     A bucket has one more number for each parameter, whose sum counts the replicas that have its gradient.
  3. A gradient that has been sent is dropped; the sum takes its place.
  4. Replicas agree on their buckets when they are made. Hooks never wait: a replica that waited within a backward would
     delay the gradient of its input, which the last microbatch of another replica may depend on.
"""

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.parameters.shards import by_size, from_local_shard, local_shard, redistributed_like
from penstock.runtime.transport.transport import PendingMessage, SumKind, Transport

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that it is sent early."""
BUCKET_BYTES = 2**23
"""On a CPU, where the thread that sums a bucket takes processor time from the backward."""
GPU_BUCKET_BYTES = 2**25
"""On GPUs, where a sum of 8 MiB ends soon after it has begun; PyTorch's DistributedDataParallel takes 25 MiB."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Holds parameters whose gradients are sent together, of one type and on one device. Of a `DTensor` the local shard
    is sent.
    """

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    counts: tuple[int, ...]
    """The lengths of the segments of a row: one for each gradient, one for the numbers that count present gradients,
    and one of padding.
    """

    @property
    def kind(self) -> SumKind:
        """The length and the type of the row."""
        # A parameter may be pointed at a version of another type than its gradients.
        return SumKind(sum(self.counts), self.parameters[0].grad_dtype or self.parameters[0].dtype)

    def pack(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """All gradients in a row, with zeros for absent ones; then a one or zero for each, whether it is present."""
        dtype = self.kind.dtype
        filled = partial(torch.full, dtype=dtype, device=local_shard(self.parameters[0]).device)
        pieces = [
            local_shard(redistributed_like(gradients[name], parameter)).reshape(-1)
            if name in gradients
            else filled((count,), 0.0)
            for name, parameter, count in zip(self.names, self.parameters, self.counts, strict=False)
        ]
        # Made on the device of the gradients: a copy of numbers to a GPU would make its host wait for all earlier work.
        runs = groupby(name in gradients for name in self.names)
        there = [filled((len(list(run)),), float(here)) for here, run in runs]
        rest = self.counts[-1]
        return torch.cat([*pieces, *there, *([filled((rest,), 0.0)] if rest else ())])

    def unpack(self, flat: Tensor, complete: bool) -> dict[str, Tensor]:
        """The present gradients, as views of `flat`. `complete`: this replica had all of them."""
        shapes = [local_shard(parameter).shape for parameter in self.parameters]
        *pieces, there, _ = torch.split(flat, list(self.counts))
        # Reading the counts makes a GPU's host wait; it is not needed where they are known.
        counts = [1.0] * len(shapes) if complete else there.tolist()
        found = zip(self.names, self.parameters, pieces, shapes, counts, strict=True)
        return {
            name: from_local_shard(piece.view(shape), parameter)
            for name, parameter, piece, shape, count in found
            if count
        }


@dataclass(frozen=True, slots=True)
class _SharedBucket:
    """Holds the parameters of a bucket by the replica that updates them, in replica order. Each receives the sums of
    its own.
    """

    parts: tuple[_Bucket, ...]
    """Some may be empty."""
    own: int
    """The place of this replica."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for part in self.parts for parameter in part.parameters)

    @property
    def kind(self) -> SumKind:
        shares = tuple(sum(part.counts) for part in self.parts)
        return SumKind(sum(shares), next(part.kind.dtype for part in self.parts if part.names), shares)

    def pack(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([part.pack(gradients) for part in self.parts if part.names])

    def unpack(self, flat: Tensor, complete: bool) -> dict[str, Tensor]:
        return self.parts[self.own].unpack(flat, complete)


@dataclass(slots=True, eq=False)
class _PendingUpdate:
    made: set[str] = field(default_factory=set)
    """The parameters whose gradients are final and not yet sent."""
    pending: list[tuple[PendingMessage, bool]] = field(default_factory=list)
    """One for each bucket that has been sent, and whether all its gradients were present."""
    began: Timestamp | None = None
    """When the first bucket was sent."""


class Reducer:
    """Sums the gradients of `parameters` of `stage` over the ranks `group`; this one is `rank`. Collective over them.

    `late`: parameters whose gradients are not final after the backward. `bucket_bytes`: None for the default of the
    device. `now`: reads the clock. `owners`: by parameter, the place in `group` of the only rank that receives its sum.
    """

    in_backward = False
    """Whether all sums are made within the last backward, in one order on all replicas."""

    def __init__(
        self,
        transport: Transport,
        group: tuple[int, ...],
        rank: int,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        late: Collection[str] = (),
        bucket_bytes: int | None = None,
        now: Callable[[], Timestamp] = time.perf_counter,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        self._transport = transport
        self._group = group
        self._rank = rank
        self._stage = stage
        self._now = now
        # The backward makes the gradients of the last layers first.
        early = [name for name in reversed(list(parameters)) if name not in late]
        ordered = {name: parameters[name] for name in (*early, *(name for name in parameters if name in late))}
        # Three ranks or more each sum a share of a bucket, so it is padded. Two ranks exchange whole buckets.
        packed = _pack(ordered, frozenset(late), bucket_bytes, len(group) if len(group) > 2 and not owners else 1)
        self._buckets: Sequence[_Bucket | _SharedBucket] = packed
        if owners is not None:
            self._buckets = [
                _SharedBucket(
                    tuple(
                        _bucket([name for name in bucket.names if owners[name] == place], ordered, 1)
                        for place in range(len(group))
                    ),
                    group.index(rank),
                )
                for bucket in packed
            ]
        self._early = {name: parameters[name] for name in early}
        self._hooks: list[RemovableHandle] = []
        self._updates: dict[int, _PendingUpdate] = {}
        transport.agree(group, rank, {self._kind(index): bucket.kind for index, bucket in enumerate(self._buckets)})

    def arm(self, version: int) -> None:
        """Registers hooks so that each bucket of gradients is sent as soon as the next backward, the last one before
        the update to `version`, has made all gradients in it. `disarm` follows that backward.
        """
        current = self._updates.setdefault(version, _PendingUpdate())
        for name, parameter in self._early.items() if self._transport.overlaps() else ():
            note = partial(self._note, current, name)
            hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def disarm(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def start(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Sends the buckets that have not been sent, out of `gradients`; parameters that it lacks have no gradient."""
        current = self._updates.setdefault(version, _PendingUpdate())
        current.made.clear()
        for bucket in self._buckets[len(current.pending) :]:
            self._send(current, bucket, gradients)

    def ready(self, version: int) -> bool:
        """Whether `finish` would return at once."""
        return all(message.ready() for message, _ in self._updates[version].pending)

    def began(self, version: int) -> Timestamp | None:
        """When the first bucket was sent; None if none was."""
        return self._updates[version].began if version in self._updates else None

    def finish(self, version: int) -> dict[str, Tensor]:
        """Waits for the sums, by name; a parameter that has no gradient on any replica is left out."""
        sums: dict[str, Tensor] = {}
        for bucket, (message, complete) in zip(self._buckets, self._updates.pop(version).pending, strict=True):
            (flat,) = message.wait()
            assert flat is not None
            sums.update(bucket.unpack(flat, complete))
        return sums

    def _note(self, current: _PendingUpdate, name: str, parameter: Tensor) -> None:
        """The gradient of `parameter` is final: sends the next buckets that are complete."""
        current.made.add(name)
        while len(current.pending) < len(self._buckets):
            bucket = self._buckets[len(current.pending)]
            if not current.made >= set(bucket.names):
                return
            current.made.difference_update(bucket.names)
            members = dict(zip(bucket.names, bucket.parameters, strict=True))
            gradients = {name: each.grad for name, each in members.items() if each.grad is not None}
            for each in bucket.parameters:
                each.grad = None
            self._send(current, bucket, gradients)

    def _send(self, current: _PendingUpdate, bucket: _Bucket | _SharedBucket, gradients: Mapping[str, Tensor]) -> None:
        if current.began is None:
            current.began = self._now()
        kind = self._kind(len(current.pending))
        message = self._transport.reduce(self._group, self._rank, kind, bucket.pack(gradients))
        current.pending.append((message, gradients.keys() >= set(bucket.names)))

    def _kind(self, index: int) -> Hashable:
        return "gradients", self._stage, index


def _pack(
    parameters: Mapping[str, nn.Parameter], late: Collection[str], bucket_bytes: int | None, shares: int
) -> tuple[_Bucket, ...]:
    """Divides `parameters` in order into buckets of at most `bucket_bytes` (or one parameter); the first one is
    smaller. Each is padded so that it can be cut into `shares` of equal length.
    """
    buckets: list[_Bucket] = []
    kinds = groupby(parameters.items(), key=lambda item: (item[1].dtype, item[1].device, item[0] in late))
    for (_, device, _), members in kinds:
        largest = bucket_bytes or (BUCKET_BYTES if device.type == "cpu" else GPU_BUCKET_BYTES)
        first = largest if buckets else min(FIRST_BUCKET_BYTES, largest)
        buckets += [_bucket(names, parameters, shares) for names in by_size(members, largest, first)]
    return tuple(buckets)


def _bucket(names: list[str], parameters: Mapping[str, nn.Parameter], shares: int) -> _Bucket:
    members = tuple(parameters[name] for name in names)
    counts = [*(local_shard(parameter).numel() for parameter in members), len(members)]
    return _Bucket(tuple(names), members, (*counts, -sum(counts) % shares))


class ShardedReducer(Reducer):
    """A `Reducer` for a stage in which `modules` are fully sharded, whose gradients PyTorch sums before each update.

    FSDP2 (Zhao et al., "PyTorch FSDP", VLDB 2023; here PyTorch's per-parameter `fully_shard`) keeps the full gradients
    of a module until a backward for which synchronization is on. That backward sums them over the replicas and leaves
    each replica its shard of the sum. Here synchronization is on for the last backward before an update only. FSDP2
    would take the mean over the replicas; ours is a sum of gradients that are weighted already, so its divisor is one.

    `parameters`: those of the other modules, which are summed as in any replicated stage.
    """

    in_backward = True
    """All replicas have equally many microbatches, and so the same program."""

    def __init__(
        self,
        transport: Transport,
        group: tuple[int, ...],
        rank: int,
        stage: int,
        parameters: Mapping[str, nn.Parameter],
        modules: Sequence["FSDPModule"],
        now: Callable[[], Timestamp],
    ) -> None:
        super().__init__(transport, group, rank, stage, parameters, now=now)
        self._plain = frozenset(parameters)
        self._modules = modules
        self._shards: dict[int, dict[str, Tensor]] = {}
        """By version, the local shards of the sums for the update to it."""
        for module in modules:
            module.set_gradient_divide_factor(1.0)
            # Otherwise it scales within the reduction, which Gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)
        self._sum_next(False)

    def arm(self, version: int) -> None:
        self._sum_next(True)
        super().arm(version)

    def disarm(self) -> None:
        self._sum_next(False)
        super().disarm()

    def start(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        self._shards[version] = {name: tensor for name, tensor in gradients.items() if name not in self._plain}
        super().start(version, {name: tensor for name, tensor in gradients.items() if name in self._plain})

    def finish(self, version: int) -> dict[str, Tensor]:
        return {**super().finish(version), **self._shards.pop(version)}

    def _sum_next(self, sums: bool) -> None:
        """Sets whether the coming backward sums over the replicas."""
        for module in self._modules:
            module.set_requires_gradient_sync(sums, recurse=False)
            module.set_is_last_backward(sums)
