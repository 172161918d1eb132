"""Which replica of a stage updates which parameters, and how the others get what it has made.

Where replicas share the optimizer's state (ZeRO-1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, section 5.1), each parameter has one owner among the replicas: its optimizer has
this parameter, and the others' have not. The gradients of a parameter are summed on its owner (`Reducer`), which steps
it and sends the new weights to the others. A parameter is never cut: an optimizer may need whole matrices, as Muon
does, and what it keeps has the form that it has in a checkpoint.

Laws of this file:
  1. All replicas assign alike: by the order and the sizes of the parameters, which are the same everywhere.
  2. What is gathered is in the memory of all replicas before the update ends. No other action waits for it.
"""

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from penstock.runtime.parameters.gradient_buckets import BUCKET_BYTES
from penstock.runtime.parameters.shards import by_size, local_shard
from penstock.runtime.transport.transport import PendingMessage, SumKind, Transport

_AT_ONCE = 2
"""The messages of weights that are under way at once; more would take more memory."""


def assign_owners(parameters: Mapping[str, nn.Parameter], loads: list[int]) -> dict[str, int]:
    """By parameter, the place of its owner: largest first, each to the replica that has the fewest bytes so far.

    `loads`: the bytes of each replica, to which those of `parameters` are added.
    """
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in parameters.items()}
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


class WeightShares:
    """What the ranks `group` exchange that each update some parameters of `stage`. This one is `rank`. Collective over
    them.

    `owners`: by parameter of the stage, the place in `group` of its owner. `stepped`: those that are updated for this
    stage. `norms`: how many norms of gradients the stage has.
    """

    def __init__(
        self,
        transport: Transport,
        group: tuple[int, ...],
        rank: int,
        stage: int,
        *,
        owners: Mapping[str, int],
        stepped: Mapping[str, nn.Parameter],
        norms: int,
    ) -> None:
        self._transport, self._group, self._rank, self._stage = transport, group, rank, stage
        self.is_first = rank == group[0]
        self.parameters = stepped
        self.updated = {name: parameter for name, parameter in stepped.items() if group[owners[name]] == rank}
        """The parameters that this replica owns."""
        self.own = self.updated.keys()
        self._messages = [sorted(names, key=owners.__getitem__) for names in _divide(stepped)]
        """The names in each message, by owner."""
        kinds: dict[Hashable, SumKind] = {}
        for number, names in enumerate(self._messages):
            shares = [0] * len(group)
            for name in names:
                shares[owners[name]] += local_shard(stepped[name]).numel()
            kind = SumKind(shares[group.index(rank)], stepped[names[0]].dtype, tuple(shares), gathers=True)
            kinds[self._kind(number)] = kind
        transport.agree(group, rank, {**kinds, self._kind("norms"): SumKind(1 + norms, torch.float64)})

    def gathered(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`own`, one tensor for each parameter that this replica owns, and what the others have. Blocks."""
        pairs = self.parameters.items()
        made = {name: own[name] if name in self.own else torch.empty_like(p.detach()) for name, p in pairs}
        self.gather(made)
        return made

    def sum_norms(self, vector: Tensor) -> Tensor:
        """The sum of the vectors of all replicas, each with zeros for what the others own. Blocks."""
        (total,) = self._transport.reduce(self._group, self._rank, self._kind("norms"), vector).wait()
        assert total is not None
        return total

    @torch.no_grad()
    def gather(self, tensors: Mapping[str, Tensor]) -> None:
        """Writes into those of `tensors` that other replicas own what these have there: one for each parameter that is
        updated for this stage, of its shape and type. Blocks until all replicas have called it.
        """
        pending: deque[tuple[list[str], PendingMessage]] = deque()
        for number, names in enumerate(self._messages):
            own = [local_shard(tensors[name]).reshape(-1) for name in names if name in self.own]
            added = torch.cat(own) if own else local_shard(tensors[names[0]]).new_empty(0)
            pending.append((names, self._transport.reduce(self._group, self._rank, self._kind(number), added)))
            if len(pending) == _AT_ONCE:
                self._take(*pending.popleft(), tensors)
        while pending:
            self._take(*pending.popleft(), tensors)

    def _take(self, names: Sequence[str], message: PendingMessage, tensors: Mapping[str, Tensor]) -> None:
        (flat,) = message.wait()
        assert flat is not None
        shards = [local_shard(tensors[name]) for name in names]
        for name, shard, piece in zip(names, shards, torch.split(flat, [each.numel() for each in shards]), strict=True):
            if name not in self.own:
                shard.copy_(piece.view(shard.shape))

    def _kind(self, what: int | str) -> Hashable:
        return "shares", self._stage, what


def _divide(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """The names of `parameters` in groups of one type and of at most the bytes of a bucket, or of one parameter."""
    for _, members in groupby(parameters.items(), key=lambda item: (item[1].dtype, item[1].device)):
        yield from by_size(members, BUCKET_BYTES)
