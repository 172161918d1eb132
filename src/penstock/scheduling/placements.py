"""Where stages are: the ranks of each stage, and which of them takes which microbatch.

Routing is a rule, not a message: every rank can tell from a microbatch's number alone which replica of any stage works
on it (1F1B-RR, Narayanan et al., "PipeDream", SOSP 2019, section 3.2), so nothing has to be agreed on while training.

Laws of this file:
  1. Replica q of r takes the microbatches k with k mod r = q, forward and backward; or, when microbatches are split,
     every replica takes its share of all of them.
  2. A rank holds the same replica number of all its stages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.errors import ScheduleError

__all__ = ["Placement"]


@dataclass(frozen=True, slots=True)
class Placement:
    """`stages[s]`: the ranks that hold stage s, replica by replica. `split`: whether they share every microbatch."""

    stages: tuple[tuple[int, ...], ...]
    split: bool = False
    _held: dict[int, tuple[int, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held: dict[int, tuple[int, ...]] = {}
        for stage, ranks in enumerate(self.stages):
            for rank in ranks:
                held[rank] = (*held.get(rank, ()), stage)
        object.__setattr__(self, "_held", held)

    @classmethod
    def straight(cls, ranks: int, stages_per_rank: int = 1) -> "Placement":
        """One rank for each stage: stage s on rank s mod `ranks`, so that neighbour stages are on neighbour ranks."""
        for name, size in (("ranks", ranks), ("stages_per_rank", stages_per_rank)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ScheduleError(
                    f"schedule: {name} must be a whole number of at least 1, got {size!r}; give {name}=1 or more"
                )
        return cls(tuple((stage % ranks,) for stage in range(ranks * stages_per_rank)))

    @classmethod
    def folded(cls, ranks: int) -> "Placement":
        """Two stages for each rank, there and back again: rank r has stages r and 2 `ranks` - 1 - r, a V."""
        there = cls.straight(ranks).stages
        return cls((*there, *reversed(there)))

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self._held)

    @property
    def length(self) -> int:
        """How many stages in a row are on ranks of their own: the ranks of one pipeline, ``p`` of interleaving."""
        return len(set(self.stages))

    @property
    def straightened(self) -> "Placement":
        """The first replica of every stage alone, at its rank: what replicas that split microbatches have in common."""
        return Placement(tuple((ranks[0],) for ranks in self.stages))

    def replicas(self, stage: int) -> int:
        """``r``: how many ranks hold `stage`."""
        return len(self.stages[stage])

    def rank_of(self, stage: int, microbatch: int = 0) -> int:
        """The rank that takes `microbatch` through `stage`; the first one if they share it."""
        return self.ranks_for(stage, microbatch)[0]

    def ranks_for(self, stage: int, microbatch: int) -> tuple[int, ...]:
        """The ranks that take `microbatch` through `stage`."""
        ranks = self.stages[stage]
        return ranks if self.split else (ranks[microbatch % len(ranks)],)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, ascending."""
        return self._held[rank]

    def taken_by(self, rank: int, microbatches: range) -> range:
        """Which of `microbatches`, in a row, `rank` takes."""
        stage = self._held[rank][0]
        stride = self.stride(stage)
        if stride == 1:
            return microbatches
        first = microbatches.start + (self.stages[stage].index(rank) - microbatches.start) % stride
        return range(first, max(first, microbatches.stop), stride)

    def stride(self, stage: int) -> int:
        """From one microbatch of a replica of `stage` to its next: r, or 1 if the replicas share every microbatch."""
        return 1 if self.split else self.replicas(stage)

    def most_taken(self, stage: int, microbatches: int) -> int:
        """The most that one replica takes of so many microbatches in a row."""
        return -(-microbatches // self.stride(stage))

    def depth(self, stage: int) -> int:
        """Microbatches that each replica of `stage` must have in flight to keep all that is behind it busy.

        ``ceil(R / r)`` with R the ranks of this and all later stages (thesis, section 2.3); p - s without replicas,
        and when microbatches are split.
        """
        behind = self.stages[stage:]
        if self.split:
            return len(behind)
        return -(-sum(map(len, behind)) // self.replicas(stage))

    def whole_depth(self, stage: int) -> int:
        """``depth`` of a stage if all ranks were in it or behind it: p without replicas, on every stage."""
        return len(self.stages) if self.split else -(-self.ranks // self.replicas(stage))

    def beside(self, stage: int, other: int, rank: int) -> int:
        """The rank of `other` that has the replica number of `rank` in `stage`, modulo its replicas."""
        return self.stages[other][self.stages[stage].index(rank) % self.replicas(other)]

    def listeners(self, stage: int, other: int, rank: int) -> tuple[int, ...]:
        """The ranks of `other` that have `rank` of `stage` beside them."""
        return tuple(there for there in self.stages[other] if self.beside(other, stage, there) == rank)

    def equal(self, stages: Iterable[int]) -> bool:
        """Whether `stages` have equally many replicas."""
        return len({self.replicas(stage) for stage in stages}) <= 1

    def text(self) -> str:
        """``2-1-1``: the replicas of the stages."""
        return "-".join(str(len(ranks)) for ranks in self.stages)
