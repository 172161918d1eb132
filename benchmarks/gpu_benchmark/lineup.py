"""What the benchmark on one device compares, launch by launch, and the model that all of them train.

Every launch has a plain loop in its first process, beside which the others take their turns.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from contenders.contenders import ONE_STAGE, Absent, Entry, one_stage, penstock_entries, plain_loop
from contenders.jobs import Job, Language, Placed, Setting
from contenders.torch_contenders import torch_entries, torch_entries_in_turn
from penstock.scheduling import METHODS

LEARNING_RATE = 1e-4
PLAIN = "plain loop"
"""The name of a second one, whose ratio to the first one says what the ratios are worth."""
COMPILED = "compiled"
"""The name of the variant that rounds otherwise."""


@dataclass(frozen=True, slots=True)
class Size:
    """A model, the microbatches of a step, and the products that tell what the device can do."""

    model: Language
    narrow: Language
    """As many layers with hardly any numbers in them, so that a step takes what the host takes to ask for it."""
    samples: int
    """In a microbatch."""
    microbatches: int
    larger_samples: int
    """In a microbatch of the variant with fewer and larger ones."""
    compiler: str
    """The backend of `torch.compile` for the compiled variant."""
    matrix: int
    """Rows and columns of the matrices whose product is timed."""
    rounds: int
    steps: int
    """In a turn."""


_NANO = Language(16, 2, 4, 8)
SIZES = {
    "gpt-350m": Size(
        Language(1024, 16, 28, 1024), Language(64, 1, 28, 16), 4, 8, 16, "inductor", 8192, rounds=3, steps=2
    ),
    # Inductor would take most of a minute to compile what is trained in milliseconds.
    "nano": Size(_NANO, _NANO, 2, 4, 4, "aot_eager", 256, rounds=2, steps=1),
}
"""The first one is about as large as the medium GPT-2, whose 24 blocks and large vocabulary make as many parameters."""


@dataclass(frozen=True, slots=True)
class Variant:
    """How a plain loop and a single stage train alike."""

    name: str
    samples: int
    """In a microbatch. A step has as many samples in every variant."""
    compiler: str | None = None
    """The backend of `torch.compile`; None compiles nothing."""
    clip_grad_norm: float | None = None
    narrow: bool = True
    """Whether the host is measured with the narrow model, too."""

    @property
    def patience_seconds(self) -> float:
        """How long a contender may take, from building it to its last turn."""
        return 60.0 if self.compiler is None else 120.0


def variants_of(size: Size) -> tuple[Variant, ...]:
    """The usual one, which most contenders have, and those that only a plain loop and a single stage have."""
    return (
        Variant("plain", size.samples),
        Variant("clipped", size.samples, clip_grad_norm=1.0),
        # The host does no more for a large microbatch than for a small one.
        Variant(f"{size.larger_samples} samples", size.larger_samples, narrow=False),
        # The narrow model would have to be compiled, too, which takes as long as the large one.
        Variant(COMPILED, size.samples, compiler=size.compiler, narrow=False),
    )


@dataclass(frozen=True, slots=True)
class Launch:
    """The contenders of a number of processes, by the library that they are of and the schedule."""

    processes: int
    ranks: int
    """In one process, or in one each."""
    schedules: tuple[str, ...]
    """Of Penstock."""
    torch: tuple[str, ...] = ()
    """Those of torch's schedules that take part."""
    loops: bool = False
    """Whether the plain loop and a single stage do, in every variant."""


EVERY = tuple(method.name for method in METHODS)
IN_TURN = ("torch looped bfs", "torch interleaved", "torch interleaved zb", "torch zbv")
"""torch's GPipe and 1F1B want each stage in a process of its own; the first two of these are the same orders."""
LAUNCHES = (
    Launch(1, 2, EVERY, IN_TURN, loops=True),
    Launch(2, 2, ("1f1b-flush", "interleaved", "zb-v", "2bw")),
    # torch's zbv has two stages in a process and no more.
    Launch(1, 4, ("1f1b-flush", "interleaved", "zb-h1", "2bw"), ("torch interleaved",)),
    Launch(4, 4, ("1f1b-flush", "2bw")),
    Launch(2, 2, (), ("torch gpipe", "torch 1f1b")),
)
"""What matters most comes first: a deadline cuts off the end. What may well fail has a launch of its own."""


@dataclass(frozen=True, slots=True)
class Contender:
    """What becomes a row."""

    entry: Entry | Absent
    variant: Variant
    """How it trains."""
    beside: Variant
    """How the plain loop trains that takes turns with it."""

    @property
    def name(self) -> str:
        """The same in several launches."""
        return self.entry.name

    @property
    def stays(self) -> bool:
        """Whether it is a loop that others take turns with later."""
        return self.variant != self.beside


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """In one kernel, as in a usual training on a GPU."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def setting_of(job: Job, size: Size, device: torch.device, ranks: int, variant: Variant) -> Setting:
    """`job` as it is trained in `variant`: weights of float32, computed with in bfloat16."""
    return Setting(
        Placed(job, device, variant.samples),
        ranks,
        size.samples * size.microbatches // variant.samples,
        optimizer=adamw,
        autocast=torch.bfloat16,
        compiler=variant.compiler,
        clip_grad_norm=variant.clip_grad_norm,
    )


def contenders_of(
    launch: Launch, size: Size, device: torch.device, only: re.Pattern[str] | None = None
) -> list[Contender]:
    """The contenders of `launch` in whose names `only` is found; all of them without it."""
    usual = variants_of(size)[0]
    setting = setting_of(size.model, size, device, launch.ranks, usual)
    theirs = torch_entries_in_turn(setting) if launch.processes == 1 else torch_entries(setting)
    by_name = {one.name: one for one in (*penstock_entries(setting), *theirs)}
    names = (*(f"penstock {schedule}" for schedule in launch.schedules), *launch.torch)
    every = [*(_loops_of(size) if launch.loops else ()), *(Contender(by_name[name], usual, usual) for name in names)]
    return [one for one in every if only is None or only.search(one.name)]


def _loops_of(size: Size) -> Iterator[Contender]:
    """A plain loop, whose ratio says what the variant is worth, and one stage, whose ratio says what Penstock takes."""
    usual = variants_of(size)[0]
    for variant in variants_of(size):
        suffix = "" if variant == usual else f", {variant.name}"
        yield Contender(replace(plain_loop(), name=PLAIN + suffix), variant, usual)
        yield Contender(replace(one_stage(), name=ONE_STAGE + suffix), variant, variant)
