"""The laws that each stage keeps by itself: order, weight versions, and what it holds in memory.

Every law recomputes what it expects by counting along the program; none of them asks the order that made the program.

Laws of this file:
  1. A law is a function of the evidence that returns nothing, or raises a `ScheduleError` that shows the row.
  2. A law may rely on the laws before it in `STAGE_LAWS`.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import assert_never

from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Forward, Update, WeightGradients
from penstock.scheduling.definitions import VersionRule
from penstock.scheduling.verification.violations import Evidence, Replica, report_breach

__all__ = ["STAGE_LAWS"]


def _require_training(evidence: Evidence) -> None:
    law = "an inference has forwards only"
    if evidence.guarantees.trains:
        return
    for replica in evidence.replicas:
        for index, action in replica.turns:
            if not isinstance(action, Forward):
                report_breach(evidence, law, replica.rank, index, "no backward and no update", "drop it, or train")


def _require_once(evidence: Evidence) -> None:
    law = "each microbatch goes forward and backward exactly once on each stage"
    for replica in evidence.replicas:
        forwards: set[int] = set()
        inputs: set[int] = set()
        weights: set[int] = set()
        mine = evidence.placement.taken_by(replica.rank, range(evidence.microbatches))
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
                mend = "drop the second one"
                report_breach(evidence, law, replica.rank, index, "a microbatch that is not done yet", mend)
            if action.microbatch not in mine:
                rank = evidence.placement.rank_of(replica.stage, action.microbatch)
                report_breach(evidence, law, replica.rank, index, f"it on rank {rank}", f"move it to rank {rank}")
            for done in seen:
                done.add(action.microbatch)
        end = len(evidence.programs[replica.rank])
        for microbatch in mine:
            if microbatch not in forwards:
                expected = f"a forward of microbatch {microbatch} on stage {replica.stage} before the end"
                report_breach(evidence, law, replica.rank, end, expected, "add it, or verify fewer minibatches")


def _require_drained(evidence: Evidence) -> None:
    law = "nothing is in flight after the drain: every forward had its backward"
    if not evidence.guarantees.trains:
        return
    for replica in evidence.replicas:
        done = {action.microbatch for _, action in replica.turns if isinstance(action, WeightGradients)}
        parts = {action.microbatch for _, action in replica.turns if isinstance(action, BackwardInput)}
        for index, action in replica.turns:
            if isinstance(action, Forward) and (k := action.microbatch) not in done:
                what = "the weight part of the backward" if k in parts else "a backward"
                expected = f"{what} of microbatch {k} on stage {replica.stage} before the end"
                report_breach(evidence, law, replica.rank, index, expected, "let the step or the drain yield it")


def _require_ascending(evidence: Evidence) -> None:
    law = "a stage takes its microbatches in ascending order, so that sums of gradients are the same in every method"
    for replica in evidence.replicas:
        mine = evidence.placement.taken_by(replica.rank, range(evidence.microbatches))
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
                    # The weight parts that are left come first.
                    due = mine[min(next_input, next_weight)]
                    next_input, next_weight = next_input + 1, next_weight + 1
                case Update():
                    continue
                case _:
                    assert_never(action)
            if microbatch != due:
                report_breach(
                    evidence, law, replica.rank, index, f"microbatch {due} first", f"put {due} before {microbatch}"
                )


def _require_stash(evidence: Evidence) -> None:
    law = "a backward reads the version that its forward read"
    for replica in evidence.replicas:
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
                    # A backward before its forward is left to the law of data.
                    if version != read.get(microbatch, version):
                        forward = Forward(replica.stage, microbatch, read[microbatch])
                        expected = f"version {read[microbatch]}, which {forward} read"
                        report_breach(evidence, law, replica.rank, index, expected, "give both the same version")
                case Update():
                    pass
                case _:
                    assert_never(action)


def _require_version(evidence: Evidence) -> None:
    rule = evidence.guarantees.rule
    law = f"a forward reads {rule.value}"
    admitted = _count_versions_of_input(evidence)
    for replica in evidence.replicas:
        newest = 0
        for index, action in replica.turns:
            match action:
                case Forward(microbatch=microbatch, version=version):
                    due = _version_due(rule, microbatch, evidence.shape.microbatches, newest, admitted)
                    if version != due:
                        expected = f"version {due} for microbatch {microbatch} on stage {replica.stage}"
                        report_breach(evidence, law, replica.rank, index, expected, f"read version {due}")
                    if version > newest:
                        expected = f"a version that exists: stage {replica.stage} has made only {newest} by then"
                        mend = "put the update before the forward, or the forward later"
                        report_breach(evidence, law, replica.rank, index, expected, mend)
                case Backward() | BackwardInput() | BackwardWeight():
                    pass
                case Update():
                    newest += 1
                case _:
                    assert_never(action)


def _count_versions_of_input(evidence: Evidence) -> dict[int, int]:
    """For each microbatch, how many updates the input stage had made when it took the microbatch in."""
    admitted: dict[int, int] = {}
    for replica in evidence.replicas:
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


def _require_updates(evidence: Evidence) -> None:
    law = "an update makes the next version from all backwards of its microbatches, and they read one version"
    named: dict[tuple[int, int], int] = {}
    for replica in evidence.replicas:
        newest = 0
        size = evidence.guarantees.microbatches_per_update[replica.stage]
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
                        report_breach(evidence, law, replica.rank, index, expected, f"make version {newest + 1}")
                    due = _sum_due(evidence, replica, version)
                    taken = own.pop(version, [])
                    if len(taken) != due:
                        expected = f"{due} backwards of stage {replica.stage} for it, found {len(taken)}"
                        report_breach(evidence, law, replica.rank, index, expected, "move the update")
                    read = {named.setdefault((replica.stage, version), gradient_version), *taken}
                    if read != {gradient_version}:
                        expected = f"gradients at version {', '.join(map(str, sorted(read - {gradient_version})))}"
                        mend = "name the version the backwards read"
                        report_breach(evidence, law, replica.rank, index, expected, mend)
                    newest = version
                case _:
                    assert_never(action)
        last = -(-evidence.microbatches // evidence.guarantees.microbatches_per_update[replica.stage])
        if evidence.guarantees.trains and (own or newest != last):
            end = len(evidence.programs[replica.rank])
            expected = f"an update of stage {replica.stage} after its last backward"
            report_breach(evidence, law, replica.rank, end, expected, "yield the update after the last backward")


def _sum_due(evidence: Evidence, replica: Replica, version: int) -> int:
    """How many microbatches `replica` has of those that the update to `version` sums up."""
    size = evidence.guarantees.microbatches_per_update[replica.stage]
    stop = min(version * size, evidence.microbatches)
    return len(evidence.placement.taken_by(replica.rank, range((version - 1) * size, stop)))


def _require_gradients(evidence: Evidence) -> None:
    for replica in evidence.replicas:
        most = evidence.guarantees.gradients[replica.stage]
        law = (
            f"gradients that wait for their update stay within the promise: of {most} at most on stage {replica.stage}"
        )
        size = evidence.guarantees.microbatches_per_update[replica.stage]
        waiting: set[int] = set()
        for index, action in replica.turns:
            match action:
                case Forward() | BackwardWeight():
                    pass
                case Backward(microbatch=microbatch) | BackwardInput(microbatch=microbatch):
                    # An input part may make gradients of weights, too: of those that are not split.
                    waiting.add(microbatch // size + 1)
                    if len(waiting) > most:
                        mend = "update first, or promise more"
                        expected = f"the update of stage {replica.stage} to version {min(waiting)} first"
                        report_breach(evidence, law, replica.rank, index, expected, mend)
                case Update(version=version):
                    waiting.discard(version)
                case _:
                    assert_never(action)


def _require_slots(evidence: Evidence) -> None:
    for replica in evidence.replicas:
        slots = evidence.guarantees.versions[replica.stage]
        law = f"no version is overwritten while it is needed: stage {replica.stage} keeps {slots}"
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
                        mend = "update later, or promise more versions"
                        report_breach(evidence, law, replica.rank, index, expected, mend)
                case Update():
                    newest += 1
                case _:
                    assert_never(action)


def _require_in_flight(evidence: Evidence) -> None:
    if not evidence.guarantees.trains:
        return
    for replica in evidence.replicas:
        most = evidence.guarantees.in_flight[replica.stage]
        law = f"activations in flight stay within the promise: at most {most} on stage {replica.stage}"
        in_flight = 0
        for index, action in replica.turns:
            match action:
                case Forward():
                    in_flight += 1
                    if in_flight > most:
                        mend = "run a backward first, or promise more"
                        expected = f"a backward first: {most} in flight already"
                        report_breach(evidence, law, replica.rank, index, expected, mend)
                case Backward() | BackwardWeight():
                    in_flight -= 1
                case BackwardInput() | Update():
                    pass
                case _:
                    assert_never(action)


def _require_halves(evidence: Evidence) -> None:
    for replica in evidence.replicas:
        most = evidence.guarantees.halves[replica.stage]
        law = f"microbatches that wait for their weight part stay within the promise: at most {most}"
        law += f" on stage {replica.stage}"
        halves = 0
        for index, action in replica.turns:
            match action:
                case BackwardInput():
                    halves += 1
                    if halves > most:
                        mend = "run a weight part first, let a whole backward do both, or promise more"
                        expected = f"a weight part first: {halves - 1} wait already"
                        report_breach(evidence, law, replica.rank, index, expected, mend)
                case BackwardWeight():
                    halves -= 1
                case Forward() | Backward() | Update():
                    pass
                case _:
                    assert_never(action)


STAGE_LAWS: tuple[Callable[[Evidence], None], ...] = (
    _require_training,
    _require_once,
    _require_drained,
    _require_ascending,
    _require_stash,
    _require_version,
    _require_updates,
    _require_gradients,
    _require_slots,
    _require_in_flight,
    _require_halves,
)
