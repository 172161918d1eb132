"""Times dropout whose masks are the same for any number of stages, beside dropout in PyTorch's own stream.

    python benchmarks/randomness.py --save benchmarks/results/randomness.txt

One pipeline trains blocks of a GPT with dropout in one stage, with a seed and without one by turns, step by step, as
`Pipeline(seed=...)` says. The difference between two series that do the same (the last column) is the noise.
"""

import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from measurement.reports import Report, conditions, option_parser

SIZES = {"tiny": (32, 16, 2, 4), "small": (64, 64, 4, 8), "big": (256, 128, 4, 8)}
"""Width, tokens, blocks and samples of a microbatch."""
MICROBATCHES = 4


class Block(nn.Module):
    """A block of a transformer with dropout where GPT-2 has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.qkv(self.first(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        weighed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(weighed.transpose(1, 2).reshape(batch, tokens, width)))
        return x + self.dropout(self.narrow(F.gelu(self.wide(self.second(x)))))


def build(width: int, blocks: int, sample: Tensor) -> penstock.Pipeline:
    """One stage."""
    torch.manual_seed(0)
    return penstock.Pipeline(
        nn.Sequential(*(Block(width) for _ in range(blocks))),
        (sample,),
        F.mse_loss,
        lambda params: torch.optim.SGD(params, lr=1e-3),
        microbatches=MICROBATCHES,
        stages=1,
    )


def compare(size: str, rounds: int) -> str:
    """A row of the table."""
    width, tokens, blocks, samples = SIZES[size]
    x = torch.randn(MICROBATCHES * samples, tokens, width)
    pipe = build(width, blocks, x[:samples])
    seeds = (0, None, None)
    taken: list[list[float]] = [[] for _ in seeds]
    for number in range(rounds + 3):
        for place in range(len(seeds)):
            # Each goes first as often as the others.
            which = (number + place) % len(seeds)
            pipe._engine.seed = seeds[which]
            start = time.perf_counter()
            float(pipe.step(x, x).loss)
            if number >= 3:
                taken[which].append(time.perf_counter() - start)
    repeatable, plain, again = (statistics.median(times) for times in taken)
    layer = (repeatable - plain) / (MICROBATCHES * blocks)
    return (
        f"{size:6} {plain * 1e3:12.2f} {repeatable * 1e3:12.2f} {100 * (repeatable / plain - 1):8.2f} % "
        f"{layer * 1e6:12.1f} {100 * (again / plain - 1):8.2f} %"
    )


def main() -> None:
    """Prints the table."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="steps of each pipeline")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    wish = parser.parse_args()
    Report(wish.save).add(
        conditions("benchmarks/randomness.py"),
        f"{'':6} {'own stream':>12} {'repeatable':>12} {'more':>10} {'us a layer':>12} {'noise':>10}",
        *(compare(size, wish.rounds) for size in wish.sizes),
    )


if __name__ == "__main__":
    main()
