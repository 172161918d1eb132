"""What is asked of a planner, beside the profile and the cluster.

The planners share their options; one checked value carries them, so that no option is checked twice or passed on by
hand through every call.
"""

from dataclasses import dataclass

from penstock.errors import PlanError
from penstock.planning.costs import AllReduce
from penstock.planning.memory import OPTIMIZER_COPIES
from penstock.values.documents import is_count, text_of
from penstock.values.plans import SCHEDULES, Plan, Stage, schedule_hint
from penstock.values.profiles import Profile
from penstock.values.stages import DEALT

__all__ = ["Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """How the plan is to be run, and what it may look like."""

    schedule: str = "1f1b-flush"
    microbatches: int = 1
    stages: int | None = None
    """All stages, on all ranks; None leaves it to the planner."""
    stages_per_rank: int = 1
    straight: bool = False
    """No replicas: one rank per stage."""
    allreduce: AllReduce = "ring"
    vertical_sync: bool = False
    recompute: bool = False
    optimizer_copies: float = OPTIMIZER_COPIES
    full_duplex: bool = False
    """Whether a link carries activations and gradients at the same time; SOSP'19 adds them up."""
    buffers: int = 0
    """Messages on either side of a stage that memory is set aside for; the papers leave them out."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise PlanError(
                f"schedule: expected one of {', '.join(SCHEDULES)}, found {text_of(self.schedule)}. "
                f"{schedule_hint(str(self.schedule))}Choose one of them"
            )
        counts = [("microbatches", self.microbatches), ("stages_per_rank", self.stages_per_rank)]
        counts += [("stages", self.stages)] if self.stages is not None else []
        for name, value in counts:
            if not is_count(value, least=1):
                raise PlanError(f"{name}: expected a whole number, 1 or more, found {text_of(value)}: give one")
        if self.stages_per_rank > 1 and self.schedule not in DEALT:
            raise PlanError(
                f"stages_per_rank: expected 1 under {self.schedule}, found {self.stages_per_rank}: "
                "only the schedules interleaved and zb-v put several stages on a rank"
            )
        if self.schedule == "zb-v" and self.stages_per_rank != 2:
            raise PlanError(
                f"stages_per_rank: expected 2 under zb-v, found {self.stages_per_rank}: give 2, or plan for zb-h1"
            )
        if self.stages is not None and self.stages % self.stages_per_rank:
            raise PlanError(
                f"stages: expected a multiple of {self.stages_per_rank} stages per rank, found {self.stages}: "
                "stages counts the stages of all ranks"
            )

    def arrange(self, stages: tuple[Stage, ...], profile: Profile) -> Plan:
        """These stages as a plan for microbatches like the profile's, nothing predicted yet."""
        return Plan(
            stages, self.schedule, self.microbatches, profile.microbatch_size, self.vertical_sync, self.recompute
        )

    def stage_count(self, devices: int) -> int:
        """The number of stages without replicas on `devices` devices; `PlanError` if that many are not there."""
        stages = self.stages if self.stages is not None else devices * self.stages_per_rank
        if stages > devices * self.stages_per_rank:
            raise PlanError(
                f"stages: expected at most {devices * self.stages_per_rank} ({devices} devices with "
                f"{self.stages_per_rank} stages each), found {stages}: use fewer stages or describe more devices"
            )
        return stages
