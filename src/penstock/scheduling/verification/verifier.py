"""The verifier: proves that a schedule keeps every invariant before anything runs.

It reads the programs alone, as the worker will, and recomputes every expectation by counting along them; what it shares
with the orders is what they guarantee. A wrong schedule would train wrongly or hang, in ways that are hard to
see from inside a run, so nothing runs that is not proved first.
"""

from dataclasses import dataclass

from penstock.arguments import instance, integer
from penstock.errors import ScheduleError, counted
from penstock.scheduling.actions import Offload
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.verification.message_invariants import require_message_invariants
from penstock.scheduling.verification.residence_invariants import require_residence
from penstock.scheduling.verification.stage_invariants import require_stage_invariants
from penstock.scheduling.verification.violations import StagedPrograms, collect


@dataclass(frozen=True, slots=True)
class Verification:
    """What was proved, and what the programs reached; the peaks equal the guarantees once there are enough minibatches.

    `actions`: how many were checked. `in_flight[stage]`: most microbatches between forward and backward, on a replica.
    `versions[stage]`: most weight versions alive at once. `in_flight_of_rank[rank]`: in flight on a rank's stages.
    `pending_weight_backwards[stage]`: most microbatches between input backward and weight backward, on a replica.
    """

    method: str
    minibatches: int
    actions: int
    in_flight: tuple[int, ...]
    versions: tuple[int, ...]
    in_flight_of_rank: tuple[int, ...]
    pending_weight_backwards: tuple[int, ...]

    def __str__(self) -> str:
        in_flight, versions, pending = (
            " ".join(map(str, peaks)) for peaks in (self.in_flight, self.versions, self.pending_weight_backwards)
        )
        return (
            f"{self.method}: every invariant holds for {counted(self.actions, 'action')} in "
            f"{counted(self.minibatches, 'minibatch')}; "
            f"per stage at most {in_flight} in flight"
            + (f" (waiting for a weight backward: {pending})" if any(self.pending_weight_backwards) else "")
            + f"; weight versions: {versions}"
        )


def verify(schedule: Schedule, minibatches: int | None = None) -> Verification:
    """Proves that `minibatches` steps of `schedule` and their drain keep every invariant; `ScheduleError` shows where
    one does not.

    The default number is as many as fill the pipe, reach the steady state and reuse every weight version.
    """
    instance(Schedule, "a penstock.Schedule", "make it of a plan: penstock.schedule(plan)").check(
        "verify(schedule=)", schedule, ScheduleError
    )
    minibatches = enough_minibatches(schedule) if minibatches is None else _check_minibatches(minibatches)
    programs = [*(schedule.step(minibatch) for minibatch in range(minibatches)), schedule.drain(minibatches)]
    return prove(collect(schedule, minibatches, programs))


def enough_minibatches(schedule: Schedule) -> int:
    """The steps that fill the pipe, reach the steady state and reuse every weight version."""
    return 2 + -(-2 * schedule.stages // schedule.microbatches)


def offloading_stages(schedule: Schedule) -> frozenset[int]:
    """The stages that offload."""
    programs = schedule.program(enough_minibatches(schedule))
    return frozenset(action.stage for row in programs for action in row if isinstance(action, Offload))


def verify_programs(programs: Programs, schedule: Schedule, minibatches: int) -> Verification:
    """Proves that `programs`, written by hand or changed, keep every invariant and the guarantees of `schedule`.

    `programs`: one row of actions per rank, sends and receives included (see `lower` and `parse_programs`), for
    `minibatches` whole minibatches and their drain. `ScheduleError` shows the row that does not.
    """
    minibatches = _check_minibatches(minibatches)
    return prove(collect(schedule, minibatches, (programs,)))


def _check_minibatches(minibatches: int) -> int:
    return (
        integer(1)
        .but("give 1 or more, since there is nothing to prove in none")
        .check("verify(minibatches=)", minibatches, ScheduleError)
    )


def prove(staged: StagedPrograms) -> Verification:
    """The proof of programs; `ScheduleError` shows where one violates an invariant."""
    peaks, rows = require_stage_invariants(staged)
    require_message_invariants(staged, rows)
    require_residence(rows)
    return Verification(
        method=staged.schedule.name,
        minibatches=staged.minibatches,
        actions=peaks.actions,
        in_flight=tuple(peaks.in_flight),
        versions=tuple(peaks.versions),
        in_flight_of_rank=tuple(peaks.in_flight_of_rank),
        pending_weight_backwards=tuple(peaks.pending_weight_backwards),
    )
