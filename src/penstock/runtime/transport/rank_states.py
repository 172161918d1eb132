"""What a rank knows of another one while it waits for it: at work, standing still, killed, or gone in good order.

Every rank writes signs of life to the store, with what it does. On one host the operating system knows more: whether a
process is stopped or has ended, also where a child of it keeps its connections open.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.process_states import ProcessIdentity, ProcessState

_STILL_SECONDS = 3.0
"""Without a new sign of life for this long, a rank stands still; they come once a second."""


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank as its last sign of life shows it."""

    beat: float
    """Differs from sign to sign."""
    place: str
    """Where its main thread was: in a step, in a save."""
    place_seconds: float
    """For how long, when it wrote this."""
    left: bool
    """Whether it takes part no longer: it closed its pipeline, or its script ended."""
    done: str
    """How far it came: after step 4."""
    seen: float = 0.0
    """When this process saw this sign first, by its own clock."""

    def fields(self) -> dict[str, Any]:
        """What a rank writes of itself, as a plain value."""
        return {name: value for name, value in asdict(self).items() if name != "seen"}

    @classmethod
    def read(cls, fields: Mapping[str, Any], before: "RankState | None") -> "RankState":
        """The state that a rank wrote. `before`: the state at the last look."""
        known = before is not None and before.beat == fields["beat"]
        return cls(**fields, seen=before.seen if before is not None and known else time.monotonic())

    def describe(self, process: ProcessIdentity | None) -> str:
        """What the rank does, as the end of a sentence about it. `process`: its process, if that is known."""
        silent = time.monotonic() - self.seen
        place = self.place or "outside the pipeline"
        last = f"its last sign of life came {silent:.1f} s ago, {place}"
        if self.left:
            return "has left: it closed its pipeline, or its script has ended"
        state = ProcessState.UNKNOWN if process is None else process.state()
        if state is ProcessState.GONE:
            return "was killed (out of memory?) or crashed: its process has ended"
        if state is ProcessState.STOPPED:
            return f"stands still: its process is stopped (SIGSTOP, a debugger?), {last}"
        if silent > _STILL_SECONDS:
            return f"stands still, or its host does: {last}"
        return f"is at work, {place} for {self.place_seconds + silent:.1f} s"
