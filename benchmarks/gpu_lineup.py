"""What the benchmark on one device compares, launch by launch, and the model that all of them train.

Every launch has a plain loop in its first process, beside which the others take their turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from contenders import Absent, Entry, one_stage, penstock_entries, plain_loop
from jobs import Job, Language, Placed, Setting
from torch import nn
from torch_contenders import torch_entries, torch_entries_in_turn

from penstock.scheduling import METHODS

LEARNING_RATE = 1e-4
PLAIN = "plain loop"
"""The name of a second one, whose ratio to the first one says what the ratios are worth."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model, the microbatches of a step, and the products that tell what the device can do."""

    model: Language
    narrow: Language
    """As many layers with hardly any numbers in them, so that a step takes what the host takes to ask for it."""
    samples: int
    """In a microbatch."""
    microbatches: int
    matrix: int
    """Rows and columns of the matrices whose product is timed."""
    rounds: int
    steps: int
    """In a turn."""


_NANO = Language(16, 2, 4, 8)
SIZES = {
    "gpt-350m": Size(Language(1024, 16, 28, 1024), Language(64, 1, 28, 16), 4, 8, 8192, rounds=3, steps=2),
    "nano": Size(_NANO, _NANO, 2, 4, 256, rounds=2, steps=1),
}
"""The first one is about as large as the medium GPT-2, whose 24 blocks and large vocabulary make as many parameters."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The contenders of so many processes, by the library that they are of and the schedule."""

    processes: int
    ranks: int
    """In one process, or in one each."""
    schedules: tuple[str, ...]
    """Of Penstock."""
    torch: tuple[str, ...] = ()
    """Those of torch's schedules that take part."""
    loops: bool = False
    """Whether the plain loop and a single stage do."""


EVERY = tuple(method.name for method in METHODS)
_OFTEN = tuple(name for name in EVERY if name != "spp")
"""Without the one that is for slow links: on one card once is enough."""
IN_TURN = ("torch looped bfs", "torch interleaved", "torch interleaved zb", "torch zbv")
"""torch's GPipe and 1F1B want each stage in a process of its own; the first two of these are the same orders."""
LAUNCHES = (
    Launch(1, 2, EVERY, IN_TURN, loops=True),
    Launch(2, 2, _OFTEN),
    Launch(4, 4, ("1f1b-flush", "1f1b", "2bw")),
    Launch(2, 2, (), ("torch gpipe", "torch 1f1b")),
    # torch's zbv has two stages in a process and no more.
    Launch(1, 4, _OFTEN, IN_TURN[:3]),
)
"""What matters most comes first: a deadline cuts off the end. What may well fail has a launch of its own."""


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """In one kernel, as whoever trains on a GPU has it."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def setting_of(job: Job, size: Size, device: torch.device, ranks: int) -> Setting:
    """`job` as all contenders train it: weights of float32, computed with in bfloat16."""
    placed = Placed(job, device, size.samples)
    return Setting(placed, ranks, size.microbatches, optimizer=adamw, autocast=torch.bfloat16)


def entries_of(launch: Launch, setting: Setting) -> list[Entry | Absent]:
    """The contenders of `launch` that fit, and the others with the reason why not."""
    loops = [replace(plain_loop(), name=PLAIN), one_stage()] if launch.loops else []
    theirs = torch_entries_in_turn(setting) if launch.processes == 1 else torch_entries(setting)
    by_name = {one.name: one for one in (*penstock_entries(setting), *theirs)}
    names = (*(f"penstock {schedule}" for schedule in launch.schedules), *launch.torch)
    return [*loops, *(by_name[name] for name in names)]
