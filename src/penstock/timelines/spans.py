"""A span: one action of one rank, from a start to a stop in seconds.

The simulator predicts spans, the runtime measures them, and both are drawn alike. A span holds the text form of its
action, which this file parses without importing `scheduling`.
"""

import math
import re
from dataclasses import dataclass, fields
from functools import lru_cache

from penstock.errors import ScheduleError

# The text forms of penstock.scheduling.actions: 2F0@1, 2B0@1, 2I0@1, 2W0@1, 2U3<1, 2A3, 2S0>3, 3R0<2, 0T1>3,
# 3T1<0, 2N3>1, 1N3<2, 2H0, 2H0+3, 2D0, 2C0@1, 2G1, 2Q1.
_ACTION_TEXT = re.compile(r"[0-9]+(?:(?:[FBIWC][0-9]+@|[URTN][0-9]+<|[STN][0-9]+>|H[0-9]+\+)[0-9]+|[AHDGQ][0-9]+)")
_SEPARATORS = re.compile(r"[FBIWCUASRTNHDGQ@<>+]")
_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward input",
    "W": "backward weight",
    "C": "recompute",
    "U": "update",
    "A": "reduce",
    "S": "send",
    "R": "receive",
    "H": "offload",
    "D": "reload",
    "G": "fetch",
    "Q": "release",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Records that `rank` ran `action`, in its text form such as ``2F0@1``, from start to stop (seconds, any origin).

    A send lasts as long as its transfer, a receive as long as the rank waits for it, a reduction until the sum is
    complete. Raises `ScheduleError` if the action cannot be parsed or the span ends before it starts.
    """

    rank: int
    action: str
    start_seconds: float
    stop_seconds: float
    size_bytes: float | None = None
    """The bytes of a transfer or a sum of gradients, where known."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ScheduleError(
                f"span of {self.action}: expected a rank of 0 or more, found {self.rank}: pass the global rank"
            )
        if _ACTION_TEXT.fullmatch(self.action) is None:
            raise ScheduleError(
                f"span of rank {self.rank}: expected an action like 2F0@1, 2B0@1, 2I0@1, 2W0@1, 2U3<1, 2A3, 2S0>3, "
                f"3R0<2, 0T1>3, 3T1<0, 2N3>1, 1N3<2, 2H0, 2D0, 2C0@1, 2G1 or 2Q1, found {self.action!r}: pass "
                "str(action)"
            )
        if not -math.inf < self.start_seconds <= self.stop_seconds < math.inf:
            raise ScheduleError(
                f"span of {self.action} on rank {self.rank}: expected a finite start and a stop not before it, found "
                f"{self.start_seconds!r} to {self.stop_seconds!r} seconds: read both from one clock"
            )

    @staticmethod
    def unchecked(rank: int, action: str, start: float, stop: float, size: float | None) -> "Span":
        """``Span(...)`` without its checks, for values that are valid by construction."""
        span = _new(Span)
        _set_rank(span, rank)
        _set_action(span, action)
        _set_start(span, start)
        _set_stop(span, stop)
        _set_size(span, size)
        return span

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.stop_seconds - self.start_seconds

    @property
    def kind(self) -> str:
        """``forward``, ``backward``, ``backward input``, ``backward weight``, ``update``, ``reduce``, ``send``,
        ``receive``, ``offload``, ``reload``, ``recompute``, ``fetch`` or ``release``.
        """
        return _read(self.action)[0]

    @property
    def topic(self) -> str:
        """``tied gradients`` or ``norms`` for a transfer of these, else an empty string."""
        return "tied gradients" if "T" in self.action else "norms" if "N" in self.action else ""

    @property
    def computes(self) -> bool:
        """Whether it is computation (forward, backward, update) and not communication."""
        return self.kind not in ("send", "receive", "reduce") and not self.copies

    @property
    def copies(self) -> bool:
        """Whether it is a copy between a device and its host (offload, reload, fetch, release)."""
        return self.kind in ("offload", "reload", "fetch", "release")

    @property
    def stage(self) -> int:
        """The stage of the action."""
        return _read(self.action)[1]

    @property
    def number(self) -> int:
        """The microbatch; for an update, and for transfers and reductions that serve one, the version it creates; for a
        fetch and a release the version of the weights.
        """
        return _read(self.action)[2]

    @property
    def reference(self) -> int:
        """The version of a forward or backward, the gradients' version of an update, the other stage of a transfer;
        the `number` again for a reduction, and for a copy between a device and its host.
        """
        return _read(self.action)[3]

    @property
    def words(self) -> str:
        """The action in words: ``forward 0``, ``update 3``, ``send 0 to stage 3``."""
        what = f"{self.topic} for version {self.number}" if self.topic else str(self.number)
        match self.kind:
            case "send":
                return f"send {what} to stage {self.reference}"
            case "receive":
                return f"receive {what} from stage {self.reference}"
            case "reduce":
                return f"sum of gradients for version {self.number}"
            case "fetch" | "release" as kind:
                return f"{kind} of weights {self.number}"
            case "backward input" | "backward weight" as kind:
                return f"{kind.removeprefix('backward ')} backward {self.number}"
            case kind:
                return f"{kind} {self.number}"

    @property
    def details(self) -> dict[str, int | str]:
        """The action and its fields by name."""
        match self.kind:
            case "reduce" | "fetch" | "release":
                return {"action": self.action, "stage": self.stage, "version": self.number}
            case "offload" | "reload":
                return {"action": self.action, "stage": self.stage, "microbatch": self.number}
            case "forward" | "backward" | "backward input" | "backward weight" | "recompute":
                names = ("microbatch", "version")
            case "update":
                names = ("version", "gradient_version")
            case "send":
                names = ("version" if self.topic else "microbatch", "target")
            case _:
                names = ("version" if self.topic else "microbatch", "source")
        return {"action": self.action, "stage": self.stage, names[0]: self.number, names[1]: self.reference}


def trace_label(action: str) -> str:
    """The action in a trace of `torch.profiler`: ``penstock forward stage 1 microbatch 3``."""
    kind, stage, number, reference = _read(action)
    topic = " tied gradients" if "T" in action else " norms" if "N" in action else ""
    unit = "version" if topic or kind in ("update", "reduce", "fetch", "release") else "microbatch"
    # "input backward", as in the texts of spans.
    what = " ".join(reversed(kind.split()))
    label = f"penstock {what}{topic} stage {stage} {unit} {number}"
    match kind:
        case "send":
            return f"{label} to stage {reference}"
        case "receive":
            return f"{label} from stage {reference}"
        case _:
            return label


_new = object.__new__
# The setters of the slots, since the class is frozen. Unpacked, so that another field in Span is an error here.
_set_rank, _set_action, _set_start, _set_stop, _set_size = (Span.__dict__[field.name].__set__ for field in fields(Span))


@lru_cache(maxsize=1 << 16)
def _read(action: str) -> tuple[str, int, int, int]:
    """Kind, stage, number and reference; cached, since a picture needs them often."""
    stage, number, *reference = map(int, _SEPARATORS.split(action))
    if "T" in action or "N" in action:
        kind = "send" if ">" in action else "receive"
    else:
        kind = _KINDS[action.lstrip("0123456789")[0]]
    return kind, stage, number, reference[0] if reference else number
