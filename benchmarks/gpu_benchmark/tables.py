"""The table of the benchmark on one device, and what its columns say."""

import statistics
from collections.abc import Sequence

from gpu_benchmark.devices import CORES, MPS, SLICES
from gpu_benchmark.figures import Missing, Row

NAME_WIDTH = 32


def table(rows: Sequence[Row | Missing]) -> str:
    """All of them, launch by launch."""
    head = (
        f"{'':{NAME_WIDTH}}{'proc':>5}{'ranks':>6}{'ready s':>9}{'ms/step':>9}{'tokens/s':>11}  {'beside':11}"
        f"{'plain':>7}{'least':>7}{'most':>7}{'matrix':>8}{'idle':>7}{'peak MB':>9}{'active':>9}{'reserved':>9}"
        f"{'versions':>10}{'held':>9}{'us/action':>11}{'beyond':>10}{'us/mb':>10}{'sent MB':>9}{'loss 1':>9}"
        f"{'loss 3':>9}"
    )
    return "\n".join([head, *(line_of(row).rstrip() for row in rows)])


def line_of(row: Row | Missing) -> str:
    """Its line of the table."""
    start = f"{row.name:{NAME_WIDTH}}{row.processes:>5}{row.ranks:>6}"
    if isinstance(row, Missing):
        return f"{start}  {row.reason}"
    ratios = [plain / own for plain, own in zip(row.plain_seconds, row.step_seconds, strict=True)]
    microbatch = statistics.median(row.host_seconds) / row.microbatches if row.host_seconds else None
    memory = (row.peak_bytes, row.active_bytes, row.reserved_bytes)
    return start + "".join(
        [
            f"{row.ready_seconds:9.1f}{1e3 * statistics.median(row.step_seconds):9.2f}{row.tokens_per_second:11,.0f}",
            f"  {row.beside:11}",
            "".join(f"{one:7.3f}" for one in (row.over_plain, min(ratios), max(ratios))),
            f"{row.share_of_matrix:8.1%}",
            f"{'-' if not row.idle_shares else f'{statistics.median(row.idle_shares):.1%}':>7}",
            "".join(f"{_mega(max(one) if one else None):>9}" for one in memory),
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


_SHARING = {
    CORES: """\
the cores of a CPU are shared, which says nothing of a GPU.""",
    SLICES: """\
this is time slicing. No control daemon of MPS runs, so the contexts of the processes
take turns on the card, and these rows say more of the card's driver than of Penstock.""",
    MPS: """\
they run under MPS, which lets kernels of several processes run at the same time.""",
}


def legend(sharing: str) -> str:
    """What the columns say; `sharing`: how several processes share the device."""
    return f"""\
proc, ranks: the processes that share the device, and the ranks of the pipeline, which take turns in one process.
Where several processes share the device, {_SHARING[sharing]}
ready: seconds to build it and to take three steps, in which it is compiled if its name says so; this is in no other
column. What the plain loop has compiled lies in a cache when the stage is compiled.
compiled: torch.compile of the whole model in the plain loop, and of the same layers in Penstock (compile=). The loss,
clipping and the optimizer are compiled in neither. clipped: to a norm of 1, by torch.nn.utils.clip_grad_norm_ in the
plain loop, by clip_grad_norm= in Penstock. samples: of a microbatch; a step has as many tokens, in fewer microbatches.
plain: how many times as fast as the plain loop that takes turns with it, by the median of the rounds; least, most: of
the rounds. beside: which plain loop that is. One stage that is compiled, clipped, or has larger microbatches stands
beside a plain loop that is so, too. That loop's own row stands beside the usual loop, and says what this alone changes.
The row of the usual plain loop says what such a ratio is worth.
matrix: the model's operations per second over those of large products in bfloat16.
idle: the share of a step's time in which no rank has a forward, a backward or an update under way on the device, by
Pipeline.timeline(). If the device waits for the host in the midst of one of these, that does not count.
peak, active, reserved: MB of the process with the most, beyond the plain loops that stay. peak is torch.cuda's
max_memory_allocated, which falls as soon as the program gives a tensor up; active has also what a stream may still use,
and reserved all that the allocator has taken from the device. These two decide about running out of memory. Each of
several processes holds the whole model, the weights of the other stages once.
versions: MB of all weight versions but one of each stage, by the schedule; held: how much more is held than under
1f1b-flush when nothing is in flight, of all processes.
us/action: until a step returns, without waiting for the device, of a narrow model with as many layers, for each action
of the first process (sends, receives and updates too); beyond: without what the plain loop takes; us/mb: for each
microbatch. Several processes wait for each other in these. Not measured where the narrow model would have to be
compiled, too, or where microbatches are larger.
sent: in a step, of the process with the most. loss: of the first and the third step."""
