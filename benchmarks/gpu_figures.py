"""The rows of the benchmark on one device: arithmetic on what was taken, and the table.

A model of N parameters and L blocks of width H computes ``6 N + 12 L H T`` floating-point operations for a token of a
text of T, forward and backward: appendix B of PaLM (Chowdhery et al., JMLR 2023), which writes heads times their size
for H. Attention counts as if it were not causal, and what is computed again does not count.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache

import torch
from contenders import Absent, Entry
from gpu_lineup import Launch, Size
from gpu_turns import Facts, Taken
from ideals import speedup
from jobs import Language

UPDATES_BETWEEN = ("penstock 1f1b",)
"""They update their weights after every microbatch, so that the later ones of the first step have newer ones."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender. Series are by round, lists of bytes by process."""

    name: str
    processes: int
    ranks: int
    """In one process, or in one each."""
    microbatches: int
    step_seconds: list[float]
    plain_seconds: list[float]
    """Of the plain loop beside it."""
    over_plain: float
    """How many times as fast as that, by the median of the rounds."""
    tokens_per_second: float
    share_of_matrix: float
    """The model's floating-point operations per second over those of large matrix products in the same launch."""
    peak_bytes: list[int] | None
    held_bytes: list[int] | None
    """When nothing is in flight: weights, all their versions, and the state of the optimizer."""
    versions_bytes: int
    """All weight versions but one of each stage, by the schedule."""
    versions_held: int | None
    """The same as measured: how much more is held than under `1f1b-flush`. None where that is not known."""
    host_seconds: list[float]
    """Until a step returns, of the narrow model."""
    plain_host_seconds: list[float]
    actions: int
    """In a step of the first process, sends and receives among them; 0 for what is no pipeline of Penstock's."""
    sent_bytes: list[float]
    """In a step, by schedule and shapes; nothing within a process."""
    losses: list[float]
    """Of the first steps."""

    @property
    def host_per_action(self) -> float | None:
        """Seconds of the host."""
        return statistics.median(self.host_seconds) / self.actions if self.actions else None

    @property
    def beyond_plain_per_action(self) -> float | None:
        """Those of them that the plain loop does not take, whose work all processes together have, but one has not."""
        if not self.actions or self.processes > 1:
            return None
        pairs = zip(self.host_seconds, self.plain_host_seconds, strict=True)
        return statistics.median(own - plain for own, plain in pairs) / self.actions


@dataclass(frozen=True, slots=True)
class Missing:
    """A contender without figures."""

    name: str
    processes: int
    ranks: int
    reason: str


@cache
def parameters_of(model: Language) -> int:
    """How many numbers are trained."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model.build().parameters())


def tokens_of(size: Size) -> int:
    """In a step."""
    return size.microbatches * size.samples * size.model.context


def step_flops(size: Size) -> float:
    """Of the model, in a step."""
    model = size.model
    return tokens_of(size) * (6 * parameters_of(model) + 12 * model.blocks * model.width * model.context)


def row_of(launch: Launch, size: Size, entry: Entry, facts: Facts, taken: Sequence[Sequence[Taken]]) -> Row:
    """`taken`: by process, with the model and with the narrow one."""
    models, narrow = [both[0] for both in taken], taken[0][1]
    first = models[0]
    seconds = statistics.median(first.wall)
    return Row(
        entry.name,
        launch.processes,
        ranks_of(launch, entry),
        size.microbatches,
        first.wall,
        first.plain_wall,
        speedup(first.plain_wall, first.wall),
        tokens_of(size) / seconds,
        step_flops(size) / seconds / facts.matrix_flops,
        _all([one.peak_bytes for one in models]),
        _all([one.held_bytes for one in models]),
        first.versions_bytes,
        None,
        narrow.host,
        narrow.plain_host,
        narrow.actions,
        list(entry.sent_bytes) if launch.processes > 1 else [],
        next((one.losses for one in models if one.losses), []),
    )


def ranks_of(launch: Launch, entry: Entry | Absent) -> int:
    """How many ranks it has."""
    return 1 if isinstance(entry, Entry) and entry.alone else launch.ranks


def _all(found: Sequence[int | None]) -> list[int] | None:
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) else None


def with_versions(rows: Sequence[Row | Missing]) -> list[Row | Missing]:
    """`rows`, and what the weight versions in them were measured to take."""
    bases = {
        (row.processes, row.ranks): sum(row.held_bytes)
        for row in rows
        if isinstance(row, Row) and row.name == "penstock 1f1b-flush" and row.held_bytes is not None
    }
    return [
        replace(row, versions_held=sum(row.held_bytes) - bases[row.processes, row.ranks])
        if isinstance(row, Row)
        and row.versions_bytes
        and row.held_bytes is not None
        and (row.processes, row.ranks) in bases
        else row
        for row in rows
    ]


def agreement(rows: Sequence[Row | Missing]) -> float:
    """How far the first losses of all that compute them with the first weights are apart, over their mean."""
    told = [row.losses[0] for row in rows if isinstance(row, Row) and row.name not in UPDATES_BETWEEN and row.losses]
    return (max(told) - min(told)) / statistics.fmean(told) if told else 0.0


def table(rows: Sequence[Row | Missing]) -> str:
    """All of them, launch by launch."""
    head = (
        f"{'':24}{'proc':>5}{'ranks':>6}{'ms/step':>9}{'least':>9}{'most':>9}{'tokens/s':>11}{'plain':>7}"
        f"{'least':>7}{'most':>7}{'matrix':>8}{'peak MB':>9}{'versions':>10}{'held':>9}{'us/action':>11}{'beyond':>10}"
        f"{'us/mb':>10}{'sent MB':>9}{'loss 1':>9}{'loss 3':>9}"
    )
    return "\n".join([head, *(line_of(row).rstrip() for row in rows)])


def value_of(row: Row | Missing) -> dict[str, object]:
    """It, for JSON."""
    if isinstance(row, Missing):
        return asdict(row)
    host = {"host_per_action": row.host_per_action, "beyond_plain_per_action": row.beyond_plain_per_action}
    return {**asdict(row), **host}


def line_of(row: Row | Missing) -> str:
    """Its line of the table."""
    start = f"{row.name:24}{row.processes:>5}{row.ranks:>6}"
    if isinstance(row, Missing):
        return f"{start}  {row.reason}"
    ratios = [plain / own for plain, own in zip(row.plain_seconds, row.step_seconds, strict=True)]
    seconds = (statistics.median(row.step_seconds), min(row.step_seconds), max(row.step_seconds))
    microbatch = statistics.median(row.host_seconds) / row.microbatches
    return start + "".join(
        [
            "".join(f"{1e3 * one:9.2f}" for one in seconds),
            f"{row.tokens_per_second:11,.0f}",
            "".join(f"{one:7.3f}" for one in (row.over_plain, min(ratios), max(ratios))),
            f"{row.share_of_matrix:8.1%}",
            f"{_mega(max(row.peak_bytes) if row.peak_bytes else None):>9}",
            f"{_mega(row.versions_bytes or None):>10}{_mega(row.versions_held):>9}",
            f"{_micro(row.host_per_action):>11}{_micro(row.beyond_plain_per_action):>10}{_micro(microbatch):>10}",
            f"{_mega(max(row.sent_bytes, default=None)):>9}",
            "".join(f"{one:9.4f}" for one in row.losses[:: len(row.losses) - 1 or 1]),
        ]
    )


def _mega(count: float | None) -> str:
    return "-" if count is None else f"{count / 1e6:.4g}"


def _micro(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.1f}"


LEGEND = """\
proc, ranks: so many processes share the device, and so many ranks the pipeline has, which take turns in one process.
plain: how many times as fast as the plain loop that takes turns with it, round by round; for the plain loop itself this
says what such a ratio is worth.
matrix: the model's operations per second over those of large products in bfloat16.
peak: of the process with the most, beyond the plain loop beside it, by torch.cuda.max_memory_allocated. Each of several
processes holds the whole model, the weights of the other stages once.
versions: MB of all weight versions but one of each stage, by the schedule; held: how much more is held than under
1f1b-flush when nothing is in flight, of all processes.
us/action: until a step returns, without waiting for the device, of a narrow model with as many layers, for each action
of the first process (sends, receives and updates too); beyond: without what the plain loop takes; us/mb: for each
microbatch. Several processes wait for each other in these.
sent: in a step, of the process with the most. loss: of the first and the third step."""
