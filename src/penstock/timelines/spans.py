"""A span: one action of one rank, from a start to a stop in seconds.

The simulator predicts spans and the runtime measures them; whoever draws them must not care which. So a span holds the
text form of its action, which this file can read without the scheduling room: values know nothing of schedules.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

from penstock.errors import ScheduleError

__all__ = ["Span"]

# The text forms of penstock.scheduling.actions: 2F0@1, 2B0@1, 2I0@1, 2W0@1, 2U3<1, 2A3, 2S0>3, 3R0<2, 0T1>3,
# 3T1<0, 2N3>1, 1N3<2.
_FORM = re.compile(r"[0-9]+(?:(?:[FBIW][0-9]+@|[URTN][0-9]+<|[STN][0-9]+>)[0-9]+|A[0-9]+)")
_MARKS = re.compile(r"[FBIWUASRTN@<>]")
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward input",
    "W": "backward weight",
    "U": "update",
    "A": "reduce",
    "S": "send",
    "R": "receive",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Rank `rank` was busy with `action`, in its text form such as ``2F0@1``, from start to stop (seconds, any origin).

    A send lasts as long as its transfer, a receive as long as the rank waited for it, a reduction until
    the sum is there. `ScheduleError` if the action cannot be read or the span ends before it starts.
    """

    rank: int
    action: str
    start_seconds: float
    stop_seconds: float
    size_bytes: float | None = None
    """What a transfer or a sum of gradients carries, where that is known."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ScheduleError(f"span of {self.action}: expected a rank from 0, found {self.rank}")
        if _FORM.fullmatch(self.action) is None:
            raise ScheduleError(
                f"span of rank {self.rank}: expected an action like 2F0@1, 2B0@1, 2I0@1, 2W0@1, 2U3<1, 2A3, 2S0>3, "
                f"3R0<2, 0T1>3, 3T1<0, 2N3>1 or 1N3<2, found {self.action!r}: pass str(action)"
            )
        if not -math.inf < self.start_seconds <= self.stop_seconds < math.inf:
            raise ScheduleError(
                f"span of {self.action} on rank {self.rank}: expected a finite start and a stop not before it, found "
                f"{self.start_seconds!r} to {self.stop_seconds!r} seconds: read both from one clock"
            )

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.stop_seconds - self.start_seconds

    @property
    def kind(self) -> str:
        """``forward``, ``backward``, ``backward input``, ``backward weight``, ``update``, ``reduce``, ``send`` or
        ``receive``.
        """
        return _read(self.action)[0]

    @property
    def topic(self) -> str:
        """What a transfer passes: ``tied gradients``, ``norms``, or nothing special: ''."""
        return "tied gradients" if "T" in self.action else "norms" if "N" in self.action else ""

    @property
    def computes(self) -> bool:
        """Whether the device computes (forward, backward, update) rather than communicates."""
        return self.kind not in ("send", "receive", "reduce")

    @property
    def stage(self) -> int:
        """The stage whose action it is."""
        return _read(self.action)[1]

    @property
    def number(self) -> int:
        """The microbatch; for an update, and what is sent or summed for it, the version that it makes."""
        return _read(self.action)[2]

    @property
    def reference(self) -> int:
        """The version of a forward or backward, the gradients' version of an update, the other stage of a transfer.

        A reduction has none: its own number.
        """
        return _read(self.action)[3]

    @property
    def words(self) -> str:
        """What happens, for people: ``forward 0``, ``update 3``, ``send 0 to stage 3``."""
        what = f"{self.topic} for version {self.number}" if self.topic else str(self.number)
        match self.kind:
            case "send":
                return f"send {what} to stage {self.reference}"
            case "receive":
                return f"receive {what} from stage {self.reference}"
            case "reduce":
                return f"sum of gradients for version {self.number}"
            case "backward input" | "backward weight" as kind:
                return f"{kind.removeprefix('backward ')} part of backward {self.number}"
            case kind:
                return f"{kind} {self.number}"

    @property
    def details(self) -> dict[str, int | str]:
        """The action and its parts by name."""
        match self.kind:
            case "reduce":
                return {"action": self.action, "stage": self.stage, "version": self.number}
            case "forward" | "backward" | "backward input" | "backward weight":
                names = ("microbatch", "version")
            case "update":
                names = ("version", "gradient_version")
            case "send":
                names = ("version" if self.topic else "microbatch", "target")
            case _:
                names = ("version" if self.topic else "microbatch", "source")
        return {"action": self.action, "stage": self.stage, names[0]: self.number, names[1]: self.reference}


@lru_cache(maxsize=1 << 16)
def _read(action: str) -> tuple[str, int, int, int]:
    """Kind, stage, number and reference; a picture asks for them often."""
    stage, number, *reference = map(int, _MARKS.split(action))
    if "T" in action or "N" in action:
        kind = "send" if ">" in action else "receive"
    else:
        kind = _WORDS[action.lstrip("0123456789")[0]]
    return kind, stage, number, reference[0] if reference else number
