"""A stage of a plan: the layers that it holds, and the ranks that hold it."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import check_fields, entries, integer
from penstock.errors import PlanError

_LAYER = integer(0).but(
    "layers are counted from 0, and stop is the first layer of the next stage", "the index of a layer, 0 or more"
)
_RANK = integer(0).but("ranks are counted from 0", "a rank, 0 or more")


@dataclass(frozen=True, slots=True)
class Stage:
    """Holds the layers from `start` up to and without `stop`, on `ranks`; several ranks hold replicas or shards."""

    start: int
    stop: int
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_fields(self, {"start": _LAYER, "stop": _LAYER}, PlanError)
        ranks = entries("ranks", self.ranks, PlanError)
        if self.stop <= self.start:
            raise PlanError(
                f"stop: expected more than start = {self.start}, found {self.stop}: "
                "a stage holds at least one layer; use fewer stages or move a cut"
            )
        if not ranks:
            raise PlanError("ranks: expected one rank or more, found none: say which rank holds the stage")
        checked = tuple(_RANK.check(f"ranks[{index}]", rank, PlanError) for index, rank in enumerate(ranks))
        object.__setattr__(self, "ranks", checked)

    def __str__(self) -> str:
        return f"layers [{self.start}, {self.stop}) on {ranks_text(self.ranks)}"


def members_of(groups: Sequence[int], tensor_parallel: int) -> tuple[int, ...]:
    """The ranks of `groups` of `tensor_parallel` neighbours: those of group g are g t to g t + t - 1."""
    return tuple(group * tensor_parallel + member for group in groups for member in range(tensor_parallel))


def ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 0-3``, for an error or a table."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
