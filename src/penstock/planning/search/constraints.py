"""What the user fixed, and the trials that remain: who plans, for which schedule, for which microbatches.

Every choice that is not fixed is tried. A trial is one question to one planner; choices that make no sense together
are never asked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.planning.costs import AllReduce
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.planning.requests import Request
from penstock.values.clusters import Cluster
from penstock.values.documents import is_count, suggestion, text_of
from penstock.values.plans import SCHEDULES, schedule_hint
from penstock.values.profiles import Profile
from penstock.values.stages import DEALT

__all__ = ["SYNCHRONOUS", "PlanConstraints", "PlannerQuery"]

SYNCHRONOUS = ("gpipe", "1f1b-flush", "interleaved", "spp", "zb-h1", "zb-v")
"""The schedules that flush, and so train as one device does."""

_SCHEDULES_OF = {
    "pipedream": SCHEDULES,
    "2bw": ("2bw", "1f1b-flush", "gpipe"),
    "spp": ("spp",),
    "interleaved": tuple(DEALT),
    "uniform": SCHEDULES,
}
"""What each planner plans for; in the order in which they are asked, `uniform` only by name."""

_SPLITTING = ("zb-h1", "zb-v")
"""The schedules with backwards in two parts. What an input part computed again is held up to the weight part, and the
last rank has nothing to compute again: it keeps all its microbatches whole either way, so that little is gained."""

_MICROBATCHES_PER_DEVICE = 4
"""Of the default minibatch: a flush is then idle for about a fifth of the time."""

_MOST_ORDERED = 32
"""Devices: beyond so many the planner `spp`, whose time grows with their fourth power, is asked by name only."""

_MOST_FLAT = 128
"""Devices: beyond so many the planner `pipedream` is asked by name only."""


@dataclass(frozen=True, slots=True)
class PlannerQuery:
    """One question to one planner."""

    planner: str
    profile: Profile
    request: Request
    may_recompute: bool
    """Whether a planner that chooses recomputation by itself may; where the request asks for it, it must."""


@dataclass(frozen=True, slots=True)
class PlanConstraints:
    """The choices that are fixed; None leaves one to the search. `PlanError` names one that makes no sense."""

    planner: str | None = None
    schedule: str | None = None
    microbatches: int | None = None
    batch_size: int | None = None
    stages: int | None = None
    stages_per_rank: int | None = None
    straight: bool = False
    synchronous: bool = False
    vertical_sync: bool = False
    recompute: bool | None = None
    allreduce: AllReduce = "ring"
    optimizer_copies: float = OPTIMIZER_COPIES
    shared_nic: bool = False
    whole_backwards: bool = False

    def __post_init__(self) -> None:
        for name, value, known, hint in (
            ("planner", self.planner, tuple(_SCHEDULES_OF), suggestion),
            ("schedule", self.schedule, SCHEDULES, schedule_hint),
        ):
            if value is not None and value not in known:
                raise PlanError(
                    f"{name}: expected one of {', '.join(known)}, found {text_of(value)}. "
                    f"{hint(str(value), known)}Choose one of them, or leave it out to try all"
                )
        for name in ("microbatches", "batch_size", "stages", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and not is_count(value, least=1):
                raise PlanError(f"{name}: expected a whole number, 1 or more, found {text_of(value)}: give one")
        if self.microbatches is not None and self.batch_size is not None:
            raise PlanError(
                f"microbatches and batch_size: expected one of them, found {self.microbatches} and {self.batch_size}: "
                "the number of microbatches is the batch size over the microbatch size"
            )
        if not self.schedules:
            raise PlanError(self._contradiction())

    @property
    def schedules(self) -> tuple[str, ...]:
        """Those that all that is fixed leaves."""
        return tuple(
            schedule
            for schedule in SCHEDULES
            if self.schedule in (None, schedule)
            and (self.planner is None or schedule in _SCHEDULES_OF[self.planner])
            and (not self.synchronous or schedule in SYNCHRONOUS)
            and (not self.vertical_sync or schedule == "pipedream")
            and not (self.whole_backwards and schedule in _SPLITTING)
            and self._takes_stages_per_rank(schedule)
        )

    def trials(self, profiles: Sequence[Profile], cluster: Cluster) -> tuple[PlannerQuery, ...]:
        """All questions, planner by planner. `PlanError` if there is none, since the numbers do not go together."""
        trials = tuple(self._trials(profiles, cluster))
        if trials:
            return trials
        per_rank = self.stages_per_rank or 2
        if self.stages is not None and self.stages % per_rank and all(name in DEALT for name in self.schedules):
            raise PlanError(
                f"stages: expected a multiple of {per_rank} stages per rank, found {self.stages}: "
                "stages counts the stages of all ranks"
            )
        if self.batch_size is not None:
            sizes = " or ".join(str(profile.microbatch_size) for profile in profiles)
            raise PlanError(
                f"batch_size: expected a multiple of the measured microbatch size, {sizes}, found {self.batch_size}: "
                "take another batch size, or measure a profile at a size that divides it"
            )
        raise PlanError(
            f"no plan: expected layers and devices for the schedule {' or '.join(self.schedules)}, found "
            f"{len(profiles[0])} layers on {cluster.devices} devices: use fewer stages per rank, or leave the schedule "
            "to the search"
        )

    def _trials(self, profiles: Sequence[Profile], cluster: Cluster) -> Iterator[PlannerQuery]:
        for planner in self._planners(cluster):
            for schedule in self.schedules:
                if schedule in _SCHEDULES_OF[planner]:
                    for profile in profiles:
                        for request in self._requests(planner, schedule, profile, profiles[0], cluster):
                            yield PlannerQuery(planner, profile, request, self.recompute is not False)

    def count_microbatches(self, profile: Profile, first: Profile, cluster: Cluster) -> int:
        """``m`` of a minibatch whose microbatches are like those of `profile`; 0 if the batch does not divide.

        Without a batch size it is that of four microbatches of the first profile on every device.
        """
        if self.microbatches is not None:
            return self.microbatches
        batch = self.batch_size
        if batch is None:
            batch = _MICROBATCHES_PER_DEVICE * cluster.devices * first.microbatch_size
        return 0 if batch % profile.microbatch_size else batch // profile.microbatch_size

    def _planners(self, cluster: Cluster) -> Iterator[str]:
        if self.planner is not None:
            yield self.planner
            return
        if cluster.devices <= _MOST_FLAT or self.stages is not None:
            yield "pipedream"
        if not self.vertical_sync:
            yield "2bw"
            if not self.straight:
                yield from ["spp"] if cluster.devices <= _MOST_ORDERED else []
                yield "interleaved"

    def _requests(
        self, planner: str, schedule: str, profile: Profile, first: Profile, cluster: Cluster
    ) -> Iterator[Request]:
        microbatches = self.count_microbatches(profile, first, cluster)
        if schedule == "pipedream" and self.microbatches is None and self.batch_size is None:
            microbatches = 1
        if not microbatches:
            return
        again = (self.recompute,) if self.recompute is not None else (False, True)
        # Without a limit nothing is gained by it, and the planner of parallel pipelines tries both by itself.
        if self.recompute is None and (cluster.memory_bytes is None or planner == "2bw" or schedule in _SPLITTING):
            again = (False,)
        for recompute in again:
            for per_rank in self._stages_per_rank(schedule):
                straight = self._is_straight(planner, schedule)
                stages = self.stages
                if straight and stages is None:
                    stages = per_rank * _most_ranks(
                        schedule, microbatches, min(cluster.devices, len(profile) // per_rank)
                    )
                if stages == 0 or (stages or 0) % per_rank:
                    continue
                yield Request(
                    schedule=schedule,
                    microbatches=microbatches,
                    stages=stages,
                    stages_per_rank=per_rank,
                    straight=straight,
                    allreduce=self.allreduce,
                    vertical_sync=self.vertical_sync,
                    recompute=recompute,
                    optimizer_copies=self.optimizer_copies,
                )

    def _is_straight(self, planner: str, schedule: str) -> bool:
        if planner in ("uniform", "interleaved"):
            return planner == "uniform"
        return self.straight or schedule in DEALT

    def _takes_stages_per_rank(self, schedule: str) -> bool:
        match schedule:
            case "interleaved":
                return True
            case "zb-v":
                return self.stages_per_rank in (None, 2)
            case _:
                return self.stages_per_rank in (None, 1)

    def _stages_per_rank(self, schedule: str) -> tuple[int, ...]:
        if schedule != "interleaved":
            return (2,) if schedule in DEALT else (1,)
        return (self.stages_per_rank,) if self.stages_per_rank is not None else (2, 4)

    def _contradiction(self) -> str:
        fixed = {
            "planner": self.planner,
            "schedule": self.schedule,
            "synchronous": self.synchronous or None,
            "vertical_sync": self.vertical_sync or None,
            "whole_backwards": self.whole_backwards or None,
            "stages_per_rank": self.stages_per_rank if self.stages_per_rank != 1 else None,
        }
        given = ", ".join(f"{name}={value!r}" for name, value in fixed.items() if value is not None)
        return (
            f"{given}: expected choices that go together, found none that do: several stages per rank need "
            "schedule='interleaved' (or 'zb-v', for two), vertical_sync needs schedule='pipedream', synchronous=True "
            "rules out pipedream and 2bw, whole_backwards=True zb-h1 and zb-v, and the planner spp plans for "
            "schedule='spp'. Drop one of them"
        )


def _most_ranks(schedule: str, microbatches: int, ranks: int) -> int:
    """The most ranks, up to `ranks`, that `schedule` can run with so many microbatches in a row."""
    match schedule:
        case "interleaved":
            return next((count for count in range(ranks, 0, -1) if microbatches % count == 0), 0)
        case "2bw":
            return min(ranks, microbatches)
        case _:
            return ranks
