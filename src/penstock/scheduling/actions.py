"""The actions that a schedule is made of.

A schedule is data that the verifier, the simulator, the renderers and the worker all read; these are its actions.

Rules of this file:
  1. An action holds no tensor, no time and no rank: stages, microbatches and versions only.
  2. An action has one text form, and `parse` reads it back: ``parse(str(action)) == action``.
  3. Every reader matches on the union `Action` and ends with ``assert_never``. The worker has a table, which a test
     compares with the union.

Text forms (stage first, as in PyTorch's ``2F0``):

    2F0@1    stage 2, forward of microbatch 0 with the weights of version 1
    2B0@1    its backward, with the same version
    2I0@1    its input backward alone: the gradients of what the stage received
    2W0@1    its weight backward, which is left then: the gradients of the weights
    2U3<1    update of stage 2: makes version 3 from gradients taken at version 1
    2S0>3    stage 2 sends what it made of microbatch 0 to stage 3 (an activation, since 3 > 2)
    3R0<2    stage 3 receives it
    0T1>3    stage 0 sends stage 3 its gradients of the weights that they share, for the update to version 1
    3T1<0    stage 3 receives them
    2N3>1    stage 2 sends stage 1 the norms of gradients that it has at its update to version 3
    1N3<2    stage 1 receives them
    2A3      the replicas of stage 2 sum their gradients for the update to version 3: an all-reduce
    2H0      what stage 2 saved of microbatch 0 for its backward starts to move to the host, out of the device's memory
    2H0+3    the same, and its memory is free for the third forward or backward after it, not the second one
    2D0      it starts to move back to the device
    2C0@1    stage 2 computes its forward of microbatch 0 again, of which it has kept its input alone
    2G1      the weights of stage 2, of version 1, start to move from the host to the device
    2Q1      they leave the device, and the gradients of stage 2 that are there move to the host

Version 0 is the one that a run begins with. A run that continues another one also reads older versions: 0F0@-1.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Forward:
    """Stage `stage` computes its outputs for `microbatch` with weights of `version`."""

    stage: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}F{self.microbatch}@{self.version}"


@dataclass(frozen=True, slots=True)
class Backward:
    """Stage `stage` computes its gradients for `microbatch`, weights and inputs, at `version`."""

    stage: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}B{self.microbatch}@{self.version}"


@dataclass(frozen=True, slots=True)
class BackwardInput:
    """Stage `stage` computes its gradients for `microbatch` at `version`, except those that `BackwardWeight` adds.

    The gradients of its inputs are complete then, and can be sent.
    """

    stage: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}I{self.microbatch}@{self.version}"


@dataclass(frozen=True, slots=True)
class BackwardWeight:
    """Stage `stage` computes the gradients of weights that its `BackwardInput` left, for `microbatch` at `version`."""

    stage: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}W{self.microbatch}@{self.version}"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Stage `stage` computes its forward of `microbatch` with weights of `version` again, for its backward."""

    stage: int
    microbatch: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}C{self.microbatch}@{self.version}"


@dataclass(frozen=True, slots=True)
class Update:
    """Stage `stage` makes weights `version` from `version - 1` and the gradients taken at `gradient_version`."""

    stage: int
    version: int
    gradient_version: int

    def __str__(self) -> str:
        return f"{self.stage}U{self.version}<{self.gradient_version}"


@dataclass(frozen=True, slots=True)
class Offload:
    """Stage `stage` starts to move what its forward of `microbatch` saved to the host.

    The memory is free when the rank begins its forward or backward number `behind` after this, counted from 1, which
    waits for the copy; or when it begins the one behind the reload, if that is earlier.
    """

    stage: int
    microbatch: int
    behind: int = 2

    def __str__(self) -> str:
        return f"{self.stage}H{self.microbatch}" + (f"+{self.behind}" if self.behind != 2 else "")


@dataclass(frozen=True, slots=True)
class Reload:
    """Stage `stage` starts to move what it offloaded of `microbatch` back, which its backward waits for."""

    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}D{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Fetch:
    """The weights of `stage`, of `version`, start to move to the device; its next computation waits for them.

    With them come the gradients of the minibatch that the stage has made and that have left with a `Release`, if more
    are to be added to them before the next one.
    """

    stage: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}G{self.version}"


@dataclass(frozen=True, slots=True)
class Release:
    """The weights of `stage`, of `version`, leave the device, where they are unchanged; gradients move to the host."""

    stage: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}Q{self.version}"


@dataclass(frozen=True, slots=True)
class Send:
    """Stage `stage` sends its result for `microbatch` to `target`: an activation if target > stage, else a gradient."""

    stage: int
    microbatch: int
    target: int

    def __str__(self) -> str:
        return f"{self.stage}S{self.microbatch}>{self.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Stage `stage` receives the result of stage `source` for `microbatch`."""

    stage: int
    microbatch: int
    source: int

    def __str__(self) -> str:
        return f"{self.stage}R{self.microbatch}<{self.source}"


@dataclass(frozen=True, slots=True)
class SendTied:
    """Stage `stage` sends `target` its gradients of the weights that both use, for the update to `version`."""

    stage: int
    version: int
    target: int

    def __str__(self) -> str:
        return f"{self.stage}T{self.version}>{self.target}"


@dataclass(frozen=True, slots=True)
class ReceiveTied:
    """Stage `stage` receives those gradients from `source`."""

    stage: int
    version: int
    source: int

    def __str__(self) -> str:
        return f"{self.stage}T{self.version}<{self.source}"


@dataclass(frozen=True, slots=True)
class SendNorms:
    """Stage `stage` sends its neighbor `target` the norms of gradients that it has at its update to `version`."""

    stage: int
    version: int
    target: int

    def __str__(self) -> str:
        return f"{self.stage}N{self.version}>{self.target}"


@dataclass(frozen=True, slots=True)
class ReceiveNorms:
    """Stage `stage` receives the norms that `source` had at its update to `version`."""

    stage: int
    version: int
    source: int

    def __str__(self) -> str:
        return f"{self.stage}N{self.version}<{self.source}"


def carried_norms(stages: int, stage: int, target: int) -> range:
    """The stages whose norms `stage`, one of `stages`, sends its neighbor `target`, in the order of the message.

    Each stage gets the norms of all stages for the same update: those of later stages are sent from the last stage to
    the first, and those of earlier stages from the first to the last.
    """
    return range(stage, stages) if target < stage else range(stage + 1)


@dataclass(frozen=True, slots=True)
class Reduce:
    """The replicas of stage `stage` sum their gradients for the update to `version`; all wait for the last one."""

    stage: int
    version: int

    def __str__(self) -> str:
        return f"{self.stage}A{self.version}"


InputGradients: TypeAlias = Backward | BackwardInput
"""The actions that make the gradients of a stage's inputs, which earlier stages wait for."""
WeightGradients: TypeAlias = Backward | BackwardWeight
"""The actions that end the backward of a microbatch: the gradients of its stage's weights are complete then."""
Compute: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight | Update
WeightReading: TypeAlias = Forward | Backward | BackwardInput | BackwardWeight | Recompute
"""What computes with the weights of its stage, of one version."""
HostCopy: TypeAlias = Offload | Reload
WeightMove: TypeAlias = Fetch | Release
Sending: TypeAlias = Send | SendTied | SendNorms
Receiving: TypeAlias = Receive | ReceiveTied | ReceiveNorms
Message: TypeAlias = Sending | Receiving
Action: TypeAlias = Compute | Recompute | HostCopy | WeightMove | Message | Reduce

_FORMS: tuple[tuple[re.Pattern[str], type[Action]], ...] = (
    (re.compile(r"(\d+)F(\d+)@(-?\d+)"), Forward),
    (re.compile(r"(\d+)B(\d+)@(-?\d+)"), Backward),
    (re.compile(r"(\d+)I(\d+)@(-?\d+)"), BackwardInput),
    (re.compile(r"(\d+)W(\d+)@(-?\d+)"), BackwardWeight),
    (re.compile(r"(\d+)C(\d+)@(-?\d+)"), Recompute),
    (re.compile(r"(\d+)U(\d+)<(-?\d+)"), Update),
    (re.compile(r"(\d+)S(\d+)>(\d+)"), Send),
    (re.compile(r"(\d+)R(\d+)<(\d+)"), Receive),
    (re.compile(r"(\d+)T(\d+)>(\d+)"), SendTied),
    (re.compile(r"(\d+)T(\d+)<(\d+)"), ReceiveTied),
    (re.compile(r"(\d+)N(\d+)>(\d+)"), SendNorms),
    (re.compile(r"(\d+)N(\d+)<(\d+)"), ReceiveNorms),
    (re.compile(r"(\d+)A(\d+)"), Reduce),
    (re.compile(r"(\d+)H(\d+)(?:\+([1-9]\d*))?"), Offload),
    (re.compile(r"(\d+)D(\d+)"), Reload),
    (re.compile(r"(\d+)G(\d+)"), Fetch),
    (re.compile(r"(\d+)Q(\d+)"), Release),
)
_LONGEST = 40
"""The most characters of an action: Python reads no number of thousands of digits."""


def parse(text: str) -> Action:
    """The action whose text form is `text`; `ScheduleError` if there is none."""
    for pattern, kind in _FORMS if len(text) <= _LONGEST and text.isascii() else ():
        if match := pattern.fullmatch(text):
            return kind(*map(int, filter(None, match.groups())))
    raise ScheduleError(
        f"cannot read the action {text!r:.60}: expected a form like 2F0@1 (forward), 2B0@1 (backward), 2I0@1 or 2W0@1 "
        "(its input or weight backward), 2U3<1 (update), 2S0>3 (send), 3R0<2 (receive), 0T1>3 or 3T1<0 (gradients of "
        "tied weights), 2N3>1 or 1N3<2 (norms), 2A3 (all-reduce of replicas), 2H0 or 2H0+3 (offload to the host), "
        "2D0 (reload to the device), 2C0@1 (recomputation), 2G1 or 2Q1 (fetch and release of weights)"
    )


def format_programs(programs: Iterable[Iterable[Action]]) -> str:
    """The text of programs: one line per rank, ``rank 0: 0F0@0 0S0>1 ...``; `parse_programs` reads it back."""
    return "\n".join(" ".join([f"rank {rank}:", *map(str, row)]) for rank, row in enumerate(programs))


def parse_programs(text: str) -> tuple[tuple[Action, ...], ...]:
    """The programs that `text` gives, one line per rank in order; the ``rank 0:`` before a line may be left out."""
    return tuple(tuple(parse(word) for word in row.split()) for row in program_rows(text))


def program_rows(text: str) -> list[str]:
    """The lines of programs without the ``rank 0:`` before them."""
    return [re.sub(r"^rank \d+:", "", line.strip()) for line in text.strip().splitlines()]
