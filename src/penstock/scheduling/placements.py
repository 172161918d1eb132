"""Placements: the ranks of each stage, and which of them takes which microbatch.

Routing is a rule, not a message: every rank computes from a microbatch's number alone which replica of a stage takes it
(1F1B-RR, [PipeDream 2019, section 3.2]), so ranks need no agreement while they train.

Rules of this file:
  1. Replica q of r takes the microbatches k with k mod r = q, forward and backward; or, when microbatches are split,
     every replica takes its share of all of them.
  2. A rank holds the same replica number of all its stages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

from penstock.arguments import integer
from penstock.errors import ScheduleError

Skip: TypeAlias = tuple[int, int]
"""Two stages that are not adjacent and send each other values directly; the earlier one first."""


class StageLayout(Enum):
    """Says how the stages of a pipeline are laid out over its ranks."""

    ONE_PER_RANK = "one stage on each rank"
    ROUND_ROBIN = "in turn"
    V_SHAPE = "in a V"

    @property
    def has_several(self) -> bool:
        """Whether a rank can hold several stages."""
        return self is not StageLayout.ONE_PER_RANK

    def ranks(self, stages: int, length: int) -> tuple[int, ...]:
        """The rank of each of `stages` stages, without replicas, in a pipeline of `length` ranks."""
        if self is StageLayout.V_SHAPE:
            around = 2 * length
            return tuple(min(stage % around, around - 1 - stage % around) for stage in range(stages))
        return tuple(stage % length for stage in range(stages))

    def default_stages_per_rank(self, stages: int | None, ranks: int) -> int:
        """The stages on each of `ranks` ranks if that is not given: 1, or where a rank can hold several, 2.

        If `stages` is given and several ranks can hold any number of stages, it is their share of a rank.
        """
        if not self.has_several:
            return 1
        if stages is None or ranks == 1 or self is StageLayout.V_SHAPE:
            return 2
        return max(1, stages // ranks)

    def accepts(self, stages_per_rank: int) -> bool:
        """Whether a rank can hold `stages_per_rank` stages."""
        match self:
            case StageLayout.ONE_PER_RANK:
                return stages_per_rank == 1
            case StageLayout.V_SHAPE:
                return stages_per_rank == 2
            case StageLayout.ROUND_ROBIN:
                return True


@dataclass(frozen=True, slots=True)
class Placement:
    """Holds the ranks of every stage.

    `stages[s]`: the ranks that hold stage s, replica by replica. `split`: whether they share every microbatch.
    """

    stages: tuple[tuple[int, ...], ...]
    split: bool = False
    _held: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _ranks_from: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """By stage: the ranks of it and all later stages; a rank of several stages counts once for each."""
    length: int = field(init=False, repr=False, compare=False)
    """``p``: the ranks of one pipeline, without replicas; that many consecutive stages share no rank."""

    def __post_init__(self) -> None:
        held: dict[int, tuple[int, ...]] = {}
        for stage, ranks in enumerate(self.stages):
            for rank in ranks:
                held[rank] = (*held.get(rank, ()), stage)
        object.__setattr__(self, "_held", held)
        counts = list(accumulate(len(ranks) for ranks in reversed(self.stages)))
        object.__setattr__(self, "_ranks_from", tuple(reversed(counts)))
        object.__setattr__(self, "length", len(set(self.stages)))

    @classmethod
    def of_layout(cls, layout: StageLayout, ranks: int, stages_per_rank: int = 1) -> "Placement":
        """The placement of each stage on one rank, by `layout`."""
        for name, size in (("ranks", ranks), ("stages_per_rank", stages_per_rank)):
            integer(1).but(f"give {name}=1 or more").check(f"schedule: {name}", size, ScheduleError)
        return cls(tuple((rank,) for rank in layout.ranks(ranks * stages_per_rank, ranks)))

    @classmethod
    def straight(cls, ranks: int, stages_per_rank: int = 1) -> "Placement":
        """The placement of stage s on rank s mod `ranks`, so that neighbors are on neighboring ranks."""
        return cls.of_layout(StageLayout.ROUND_ROBIN, ranks, stages_per_rank)

    @classmethod
    def folded(cls, ranks: int) -> "Placement":
        """The placement in a V: rank r has stages r and 2 `ranks` - 1 - r."""
        return cls.of_layout(StageLayout.V_SHAPE, ranks, 2)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self._held)

    @property
    def first_replicas(self) -> "Placement":
        """The placement of first replicas only; where replicas split microbatches, it stands for all of them."""
        return Placement(tuple((ranks[0],) for ranks in self.stages))

    def replicas(self, stage: int) -> int:
        """``r``: the number of ranks that hold `stage`."""
        return len(self.stages[stage])

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that takes `microbatch` through `stage`; the first one if they share it."""
        ranks = self.stages[stage]
        return ranks[0 if self.split else microbatch % len(ranks)]

    def ranks_for(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """The ranks that take `microbatch` through `stage`."""
        ranks = self.stages[stage]
        return ranks if self.split else (ranks[microbatch % len(ranks)],)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return self._held[rank]

    def microbatches_of(self, rank: int, microbatches: range) -> range:
        """The microbatches that `rank` takes of the consecutive `microbatches`."""
        stage = self._held[rank][0]
        stride = self.stride(stage)
        if stride == 1:
            return microbatches
        first = microbatches.start + (self.stages[stage].index(rank) - microbatches.start) % stride
        return range(first, max(first, microbatches.stop), stride)

    def stride(self, stage: int) -> int:
        """The step from a microbatch of a replica of `stage` to its next: r, or 1 if replicas share microbatches."""
        return 1 if self.split else self.replicas(stage)

    def max_microbatches(self, stage: int, microbatches: int) -> int:
        """The most that one replica of `stage` takes of `microbatches` consecutive ones."""
        return -(-microbatches // self.stride(stage))

    def depth(self, stage: int) -> int:
        """The microbatches that each replica of `stage` must have in flight to keep all later stages busy.

        This is ``ceil(R / r)``, with R the ranks of this and all later stages [Narayanan 2021, section 2.3]. It is
        p - s without replicas, and when microbatches are split.
        """
        if self.split:
            return len(self.stages) - stage
        return -(-self._ranks_from[stage] // self.replicas(stage))

    def full_depth(self, stage: int) -> int:
        """The ``depth`` of `stage` if R were all ranks: without replicas p, for every stage."""
        return len(self.stages) if self.split else -(-self.ranks // self.replicas(stage))

    def peer_replica(self, stage: int, other: int, rank: int) -> int:
        """The rank of `other` whose replica number is that of `rank` in `stage`, modulo the replicas of `other`."""
        return self.stages[other][self.stages[stage].index(rank) % self.replicas(other)]

    def peer_replicas(self, stage: int, other: int, rank: int) -> tuple[int, ...]:
        """The ranks of `other` whose `peer_replica` in `stage` is `rank`."""
        return tuple(there for there in self.stages[other] if self.peer_replica(other, stage, there) == rank)

    def equal(self, stages: Iterable[int]) -> bool:
        """Whether all `stages` have the same number of replicas."""
        return len({self.replicas(stage) for stage in stages}) <= 1

    def text(self) -> str:
        """The numbers of replicas of the stages, as in ``2-1-1``."""
        return "-".join(str(len(ranks)) for ranks in self.stages)
