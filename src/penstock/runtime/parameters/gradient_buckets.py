"""Sums the gradients of a stage's replicas, bucket by bucket, while the backward that makes them still runs.

The bits of the sum are those of adding the replicas' gradients in replica order, on every replica: that is what makes a
replicated run repeatable, and equal to the oracle.

Laws of this file:
  1. Buckets leave in one order on all replicas, whatever order autograd makes their gradients in.
  2. A gradient that no replica has stays absent, since an optimizer with momentum or weight decay would step a zero.
     Which ones are there rides along: one number for each parameter, the sum of which counts the replicas that have it.
  3. A gradient that has been given away is forgotten; what comes back takes its place.
  4. Replicas agree on their buckets when they are made. Hooks wait for nobody: a replica that waited within a backward
     would keep back the gradient of its input, which another one's last microbatch may depend on.
"""

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.parameters.shards import of_part, part_of, settled
from penstock.runtime.transport.transport import PendingMessage, Transport

__all__ = ["Reducer"]

FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that it leaves early."""
BUCKET_BYTES = 2**23
"""On a CPU, where a bucket is summed by a thread that takes its time from the backward's."""
GPU_BUCKET_BYTES = 2**25
"""Between GPUs a sum of 8 MiB is over soon after it has begun; PyTorch's DistributedDataParallel takes 25 MiB."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters whose gradients travel together: of one type, on one device. Of a `DTensor` this process's part."""

    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    counts: tuple[int, ...]
    """The numbers of each gradient, then of those that say which are there, then of zeros that make the row as long as
    it is to be.
    """

    @property
    def form(self) -> tuple[int, torch.dtype]:
        """How many numbers the row has, and of which type."""
        return sum(self.counts), self.parameters[0].dtype

    def pack(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """All gradients in a row, with zeros for those that are absent, and then which are there."""
        like = [part_of(parameter) for parameter in self.parameters]
        pieces = [
            part_of(settled(gradients[name], parameter)).reshape(-1)
            if name in gradients
            else own.new_zeros(own.numel())
            for name, parameter, own in zip(self.names, self.parameters, like, strict=True)
        ]
        # Made where the gradients are: to copy numbers there a GPU's host would wait for all that came before.
        runs = groupby(name in gradients for name in self.names)
        there = [like[0].new_full((len(list(run)),), float(here)) for here, run in runs]
        rest = self.counts[-1]
        return torch.cat([*pieces, *there, *([like[0].new_zeros(rest)] if rest else ())])

    def unpack(self, flat: Tensor, complete: bool) -> dict[str, Tensor]:
        """The gradients that are there, as views of `flat`. `complete`: this replica gave all of them."""
        shapes = [part_of(parameter).shape for parameter in self.parameters]
        *pieces, there, _ = torch.split(flat, list(self.counts))
        # What is known need not be read, for which a GPU's host would wait.
        givers = [1.0] * len(shapes) if complete else there.tolist()
        found = zip(self.names, self.parameters, pieces, shapes, givers, strict=True)
        return {name: of_part(piece.view(shape), parameter) for name, parameter, piece, shape, given in found if given}


@dataclass(slots=True, eq=False)
class _Round:
    """One update's gradients on their way."""

    made: dict[str, nn.Parameter] = field(default_factory=dict)
    """The leaves whose gradient is final and has not left yet."""
    hooks: list[RemovableHandle] = field(default_factory=list)
    tickets: list[tuple[PendingMessage, bool]] = field(default_factory=list)
    """One for each bucket that has left, and whether no gradient was missing there."""
    began: Timestamp | None = None
    """When the first bucket left."""


class Reducer:
    """Sums the gradients of `parameters` of `stage` over the ranks `group`; this one is `rank`. Collective over them.

    `late`: parameters whose gradients are not final after the backward. `bucket_bytes`: None for what suits the device.
    `now`: takes the time.
    """

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
    ) -> None:
        self._transport = transport
        self._group = group
        self._rank = rank
        self._stage = stage
        self._now = now
        # The backward makes the gradients of the last layers first.
        early = [name for name in reversed(list(parameters)) if name not in late]
        ordered = {name: parameters[name] for name in (*early, *(name for name in parameters if name in late))}
        # What three ranks or more add is cut among them. Two swap theirs whole.
        self._buckets = _pack(ordered, frozenset(late), bucket_bytes, len(group) if len(group) > 2 else 1)
        self._late = frozenset(late)
        self._rounds: dict[int, _Round] = {}
        transport.agree(group, rank, {self._form(index): bucket.form for index, bucket in enumerate(self._buckets)})

    def arm(self, version: int, leaves: Mapping[str, nn.Parameter]) -> None:
        """From now on each bucket of the gradients of `leaves` leaves when the coming backward has made the last of it.

        It is the last backward before the update to `version`.
        """
        current = self._rounds.setdefault(version, _Round())
        for name, leaf in leaves.items() if self._transport.overlaps() else ():
            if leaf.requires_grad and name not in self._late:
                note = partial(self._note, current, name)
                hook = leaf.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                current.hooks.append(hook)

    def start(self, version: int, gradients: Mapping[str, Tensor]) -> None:
        """Sends what has not left yet, out of `gradients`; parameters that are not in it have none."""
        current = self._rounds.setdefault(version, _Round())
        for hook in current.hooks:
            hook.remove()
        current.hooks.clear()
        current.made.clear()
        for bucket in self._buckets[len(current.tickets) :]:
            self._send(current, bucket, gradients)

    def ready(self, version: int) -> bool:
        """Whether `finish` would return at once."""
        return all(ticket.ready() for ticket, _ in self._rounds[version].tickets)

    def began(self, version: int) -> Timestamp | None:
        """When the first bucket left; None if none has."""
        return self._rounds[version].began if version in self._rounds else None

    def finish(self, version: int) -> dict[str, Tensor]:
        """Waits for the sums, by name; a parameter that has no gradient on any replica is left out."""
        sums: dict[str, Tensor] = {}
        for bucket, (ticket, complete) in zip(self._buckets, self._rounds.pop(version).tickets, strict=True):
            (flat,) = ticket.wait()
            assert flat is not None
            sums.update(bucket.unpack(flat, complete))
        return sums

    def _note(self, current: _Round, name: str, leaf: Tensor) -> None:
        """The gradient of `leaf` is final: sends the next buckets that are complete."""
        assert isinstance(leaf, nn.Parameter)
        current.made[name] = leaf
        while len(current.tickets) < len(self._buckets):
            bucket = self._buckets[len(current.tickets)]
            if not current.made.keys() >= set(bucket.names):
                return
            leaves = {name: current.made.pop(name) for name in bucket.names}
            gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            for leaf in leaves.values():
                leaf.grad = None
            self._send(current, bucket, gradients)

    def _send(self, current: _Round, bucket: _Bucket, gradients: Mapping[str, Tensor]) -> None:
        if current.began is None:
            current.began = self._now()
        form = self._form(len(current.tickets))
        ticket = self._transport.reduce(self._group, self._rank, form, bucket.pack(gradients))
        current.tickets.append((ticket, gradients.keys() >= set(bucket.names)))

    def _form(self, index: int) -> Hashable:
        """Of a bucket's gradients."""
        return "gradients", self._stage, index


def _pack(
    parameters: Mapping[str, nn.Parameter], late: Collection[str], bucket_bytes: int | None, parts: int
) -> tuple[_Bucket, ...]:
    """Consecutive `parameters` in buckets of at most so many bytes (or one parameter); the first one is smaller. Each
    can be cut into so many equal `parts`.
    """
    buckets: list[_Bucket] = []
    kinds = groupby(parameters.items(), key=lambda item: (item[1].dtype, item[1].device, item[0] in late))
    for (_, device, _), members in kinds:
        largest = bucket_bytes or (BUCKET_BYTES if device.type == "cpu" else GPU_BUCKET_BYTES)
        names: list[str] = []
        size = 0
        for name, parameter in members:
            most = largest if buckets else min(FIRST_BUCKET_BYTES, largest)
            part = part_of(parameter)
            more = part.numel() * part.element_size()
            if names and size + more > most:
                buckets.append(_bucket(names, parameters, parts))
                names, size = [], 0
            names.append(name)
            size += more
        buckets.append(_bucket(names, parameters, parts))
    return tuple(buckets)


def _bucket(names: list[str], parameters: Mapping[str, nn.Parameter], parts: int) -> _Bucket:
    members = tuple(parameters[name] for name in names)
    counts = [*(part_of(parameter).numel() for parameter in members), len(members)]
    return _Bucket(tuple(names), members, (*counts, -sum(counts) % parts))
