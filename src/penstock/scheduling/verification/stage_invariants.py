"""The invariants that each stage keeps by itself: order, weight versions, and what it holds in memory.

Each recomputes what it expects by counting along the program, without the order that made the program.

Rules of this file:
  1. An invariant is a function of `StagedPrograms` that returns nothing or raises a `ScheduleError` with the row.
  2. An invariant may rely on those before it in `STAGE_INVARIANTS`.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import assert_never

from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Forward, Update, WeightGradients
from penstock.scheduling.definitions import VersionRule
from penstock.scheduling.verification.violations import Replica, StagedPrograms, report


def _require_training(staged: StagedPrograms) -> None:
    invariant = "an inference has forwards only"
    if staged.guarantees.trains:
        return
    for replica in staged.replicas:
        for index, action in replica.turns:
            if not isinstance(action, Forward):
                report(
                    staged,
                    invariant,
                    replica.rank,
                    index,
                    expected="no backward and no update",
                    fix="drop it, or train",
                )


def _require_once(staged: StagedPrograms) -> None:
    invariant = "each microbatch goes forward and backward exactly once on each stage"
    for replica in staged.replicas:
        forwards: set[int] = set()
        inputs: set[int] = set()
        weights: set[int] = set()
        mine = staged.placement.microbatches_of(replica.rank, range(staged.microbatches))
        for index, action in replica.turns:
            match action:
                case Forward():
                    seen = [forwards]
                case Backward():
                    seen = [inputs, weights]
                case BackwardInput():
                    seen = [inputs]
                case BackwardWeight():
                    seen = [weights]
                case Update():
                    continue
                case _:
                    assert_never(action)
            if any(action.microbatch in done for done in seen):
                fix = "drop the second one"
                report(staged, invariant, replica.rank, index, expected="a microbatch that is not done yet", fix=fix)
            if action.microbatch not in mine:
                rank = staged.placement.rank_of(replica.stage, action.microbatch)
                report(
                    staged, invariant, replica.rank, index, expected=f"it on rank {rank}", fix=f"move it to rank {rank}"
                )
            for done in seen:
                done.add(action.microbatch)
        end = len(staged.programs[replica.rank])
        for microbatch in mine:
            if microbatch not in forwards:
                expected = f"a forward of microbatch {microbatch} on stage {replica.stage} before the end"
                report(
                    staged, invariant, replica.rank, end, expected=expected, fix="add it, or verify fewer minibatches"
                )


def _require_drained(staged: StagedPrograms) -> None:
    invariant = "nothing is in flight after the drain: every forward had its backward"
    if not staged.guarantees.trains:
        return
    for replica in staged.replicas:
        done = {action.microbatch for _, action in replica.turns if isinstance(action, WeightGradients)}
        halved = {action.microbatch for _, action in replica.turns if isinstance(action, BackwardInput)}
        for index, action in replica.turns:
            if isinstance(action, Forward) and (k := action.microbatch) not in done:
                what = "the weight backward" if k in halved else "a backward"
                expected = f"{what} of microbatch {k} on stage {replica.stage} before the end"
                report(
                    staged, invariant, replica.rank, index, expected=expected, fix="let the step or the drain yield it"
                )


def _require_ascending(staged: StagedPrograms) -> None:
    invariant = "a stage takes its microbatches in ascending order, so that all schedules sum gradients alike"
    for replica in staged.replicas:
        mine = staged.placement.microbatches_of(replica.rank, range(staged.microbatches))
        next_forward = next_input = next_weight = 0
        for index, action in replica.turns:
            match action:
                case Forward(microbatch=microbatch):
                    due, next_forward = mine[next_forward], next_forward + 1
                case BackwardInput(microbatch=microbatch):
                    due, next_input = mine[next_input], next_input + 1
                case BackwardWeight(microbatch=microbatch):
                    due, next_weight = mine[next_weight], next_weight + 1
                case Backward(microbatch=microbatch):
                    # The weight backwards that are left come first.
                    due = mine[min(next_input, next_weight)]
                    next_input, next_weight = next_input + 1, next_weight + 1
                case Update():
                    continue
                case _:
                    assert_never(action)
            if microbatch != due:
                report(
                    staged,
                    invariant,
                    replica.rank,
                    index,
                    expected=f"microbatch {due} first",
                    fix=f"put {due} before {microbatch}",
                )


def _require_stash(staged: StagedPrograms) -> None:
    invariant = "a backward reads the version that its forward read"
    for replica in staged.replicas:
        read: dict[int, int] = {}
        for index, action in replica.turns:
            match action:
                case Forward(microbatch=microbatch, version=version):
                    read[microbatch] = version
                case (
                    Backward(microbatch=microbatch, version=version)
                    | BackwardInput(microbatch=microbatch, version=version)
                    | BackwardWeight(microbatch=microbatch, version=version)
                ):
                    # A backward before its forward is left to the invariant of data.
                    if version != read.get(microbatch, version):
                        forward = Forward(replica.stage, microbatch, read[microbatch])
                        expected = f"version {read[microbatch]}, which {forward} read"
                        report(
                            staged, invariant, replica.rank, index, expected=expected, fix="give both the same version"
                        )
                case Update():
                    pass
                case _:
                    assert_never(action)


def _require_version(staged: StagedPrograms) -> None:
    rule = staged.guarantees.rule
    invariant = f"a forward reads {rule.value}"
    admitted = _count_versions_of_input(staged)
    for replica in staged.replicas:
        newest = 0
        for index, action in replica.turns:
            match action:
                case Forward(microbatch=microbatch, version=version):
                    due = _version_due(rule, microbatch, staged.shape.microbatches, newest, admitted)
                    if staged.schedule.continued:
                        due = min(due, _version_of_endless_run(staged, replica.stage, microbatch))
                    if version != due:
                        expected = f"version {due} for microbatch {microbatch} on stage {replica.stage}"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=f"read version {due}")
                    if version > newest:
                        expected = f"a version that exists: stage {replica.stage} has made only {newest} by then"
                        fix = "put the update before the forward, or the forward later"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=fix)
                case Backward() | BackwardInput() | BackwardWeight():
                    pass
                case Update():
                    newest += 1
                case _:
                    assert_never(action)


def _count_versions_of_input(staged: StagedPrograms) -> dict[int, int]:
    """The number of updates that the input stage had made when it took in each microbatch."""
    admitted: dict[int, int] = {}
    for replica in staged.replicas:
        newest = 0
        for _, action in replica.turns if replica.stage == 0 else ():
            match action:
                case Forward(microbatch=microbatch):
                    admitted[microbatch] = newest
                case Backward() | BackwardInput() | BackwardWeight():
                    pass
                case Update():
                    newest += 1
                case _:
                    assert_never(action)
    return admitted


def _version_due(rule: VersionRule, microbatch: int, size: int, newest: int, admitted: dict[int, int]) -> int:
    match rule:
        case VersionRule.OWN_MINIBATCH:
            return microbatch // size
        case VersionRule.PREVIOUS_MINIBATCH:
            return max(microbatch // size - 1, 0)
        case VersionRule.NEWEST:
            return newest
        case VersionRule.INPUT_STAGE:
            return admitted[microbatch]
        case VersionRule.INITIAL:
            return 0
        case _:
            assert_never(rule)


def _version_of_endless_run(staged: StagedPrograms, stage: int, microbatch: int) -> int:
    """The version that `stage` reads for `microbatch` where its pipe has always been full."""
    guarantees = staged.guarantees
    return microbatch // guarantees.microbatches_per_update[stage] - guarantees.delays[stage]


def _require_updates(staged: StagedPrograms) -> None:
    invariant = "an update makes the next version from all backwards of its microbatches, and they read one version"
    named: dict[tuple[int, int], int] = {}
    for replica in staged.replicas:
        newest = 0
        size = staged.guarantees.microbatches_per_update[replica.stage]
        own: defaultdict[int, list[int]] = defaultdict(list)
        for index, action in replica.turns:
            match action:
                case Forward() | BackwardInput():
                    pass
                case (
                    Backward(microbatch=microbatch, version=version)
                    | BackwardWeight(microbatch=microbatch, version=version)
                ):
                    own[microbatch // size + 1].append(version)
                case Update(version=version, gradient_version=gradient_version):
                    if version != newest + 1:
                        expected = f"version {newest + 1}, the next of stage {replica.stage}"
                        report(
                            staged, invariant, replica.rank, index, expected=expected, fix=f"make version {newest + 1}"
                        )
                    due = _sum_due(staged, replica, version)
                    taken = own.pop(version, [])
                    if len(taken) != due:
                        expected = f"{due} backwards of stage {replica.stage} for it, found {len(taken)}"
                        report(staged, invariant, replica.rank, index, expected=expected, fix="move the update")
                    read = {named.setdefault((replica.stage, version), gradient_version), *taken}
                    if read != {gradient_version}:
                        expected = f"gradients at version {', '.join(map(str, sorted(read - {gradient_version})))}"
                        fix = "name the version the backwards read"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=fix)
                    newest = version
                case _:
                    assert_never(action)
        last = -(-staged.microbatches // staged.guarantees.microbatches_per_update[replica.stage])
        if staged.guarantees.trains and (own or newest != last):
            end = len(staged.programs[replica.rank])
            expected = f"an update of stage {replica.stage} after its last backward"
            report(
                staged, invariant, replica.rank, end, expected=expected, fix="yield the update after the last backward"
            )


def _sum_due(staged: StagedPrograms, replica: Replica, version: int) -> int:
    """How many microbatches `replica` has of those that the update to `version` sums up."""
    size = staged.guarantees.microbatches_per_update[replica.stage]
    stop = min(version * size, staged.microbatches)
    return len(staged.placement.microbatches_of(replica.rank, range((version - 1) * size, stop)))


def _require_pending_updates(staged: StagedPrograms) -> None:
    for replica in staged.replicas:
        most = staged.guarantees.pending_updates[replica.stage]
        invariant = f"pending updates stay within the guarantee: at most {most} on stage {replica.stage}"
        size = staged.guarantees.microbatches_per_update[replica.stage]
        waiting: set[int] = set()
        for index, action in replica.turns:
            match action:
                case Forward() | BackwardWeight():
                    pass
                case Backward(microbatch=microbatch) | BackwardInput(microbatch=microbatch):
                    # An input backward may make gradients of weights, too: of those that are not split.
                    waiting.add(microbatch // size + 1)
                    if len(waiting) > most:
                        fix = "update first, or guarantee more"
                        expected = f"the update of stage {replica.stage} to version {min(waiting)} first"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=fix)
                case Update(version=version):
                    waiting.discard(version)
                case _:
                    assert_never(action)


def _require_slots(staged: StagedPrograms) -> None:
    for replica in staged.replicas:
        slots = staged.guarantees.versions[replica.stage]
        invariant = f"no version is overwritten while it is needed: stage {replica.stage} keeps {slots}"
        newest = 0
        for index, action in replica.turns:
            match action:
                case (
                    Forward(version=version)
                    | Backward(version=version)
                    | BackwardInput(version=version)
                    | BackwardWeight(version=version)
                ):
                    if newest - version >= slots:
                        expected = (
                            f"version {newest - slots + 1} or newer: {version} gave its slot to {version + slots}"
                        )
                        fix = "update later, or guarantee more versions"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=fix)
                case Update():
                    newest += 1
                case _:
                    assert_never(action)


def _require_in_flight(staged: StagedPrograms) -> None:
    if not staged.guarantees.trains:
        return
    for replica in staged.replicas:
        most = staged.guarantees.in_flight[replica.stage]
        invariant = f"activations in flight stay within the guarantee: at most {most} on stage {replica.stage}"
        in_flight = 0
        for index, action in replica.turns:
            match action:
                case Forward():
                    in_flight += 1
                    if in_flight > most:
                        fix = "run a backward first, or guarantee more"
                        expected = f"a backward first: {most} in flight already"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=fix)
                case Backward() | BackwardWeight():
                    in_flight -= 1
                case BackwardInput() | Update():
                    pass
                case _:
                    assert_never(action)


def _require_in_flight_of_rank(staged: StagedPrograms) -> None:
    if not staged.guarantees.trains:
        return
    for rank, row in enumerate(staged.programs):
        most = staged.guarantees.in_flight_of_rank[rank]
        invariant = f"activations in flight stay within the guarantee: at most {most} on all stages of a rank"
        in_flight = 0
        for index, action in enumerate(row):
            in_flight += isinstance(action, Forward) - isinstance(action, WeightGradients)
            if in_flight > most:
                expected = f"a backward first: {most} in flight already"
                report(staged, invariant, rank, index, expected=expected, fix="run a backward first, or guarantee more")


def _require_weight_backwards(staged: StagedPrograms) -> None:
    for replica in staged.replicas:
        most = staged.guarantees.pending_weight_backwards[replica.stage]
        invariant = f"microbatches that wait for their weight backward stay within the guarantee: at most {most}"
        invariant += f" on stage {replica.stage}"
        pending = 0
        for index, action in replica.turns:
            match action:
                case BackwardInput():
                    pending += 1
                    if pending > most:
                        fix = "run a weight backward first, let a whole backward do both, or guarantee more"
                        expected = f"a weight backward first: {pending - 1} wait already"
                        report(staged, invariant, replica.rank, index, expected=expected, fix=fix)
                case BackwardWeight():
                    pending -= 1
                case Forward() | Backward() | Update():
                    pass
                case _:
                    assert_never(action)


STAGE_INVARIANTS: tuple[Callable[[StagedPrograms], None], ...] = (
    _require_training,
    _require_once,
    _require_drained,
    _require_ascending,
    _require_stash,
    _require_version,
    _require_updates,
    _require_pending_updates,
    _require_slots,
    _require_in_flight,
    _require_in_flight_of_rank,
    _require_weight_backwards,
)
