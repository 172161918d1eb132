"""What offloading costs on a GPU: a step of 1F1B's order, and the same with every second microbatch on the host.

    python benchmarks/offloads.py --save benchmarks/results/offloads.txt

One process trains transformer blocks in bfloat16 under a written order, as a rank of a pipeline with as many
microbatches in flight computes it. With offloads every second microbatch of the steady part leaves after its forward.
It comes back one, two or three actions before its backward. Prints the median of the steps, and the most that a step
has allocated beyond what lasts. `same losses`: whether the losses of the first steps equal those without offloads.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from measurement.reports import Report, conditions, option_parser, table
from penstock.scheduling import ScheduleDefinition, define_by_programs

BLOCKS, MICROBATCHES, FIRST, STEPS = 2, 16, 3, 8


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        heads = max(1, width // 128)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def order(in_flight: int, away: Sequence[int], ahead: int) -> ScheduleDefinition:
    """1F1B's order of a rank, the microbatches `away` on the host, and back `ahead` actions before they are due."""
    actions = [("F", k) for k in range(in_flight)]
    for k in range(MICROBATCHES):
        actions.append(("B", k))
        if k + in_flight < MICROBATCHES:
            actions.append(("F", k + in_flight))
    reloads: dict[int, list[int]] = defaultdict(list)
    for k in away:
        reloads[actions.index(("B", k)) - ahead].append(k)
    words = []
    for place, (kind, k) in enumerate(actions):
        words += [f"0D{back}" for back in reloads[place]]
        words.append(f"0{kind}{k}@0")
        words += [f"0H{k}"] * (kind == "F" and k in away)
    return define_by_programs("offloads", f"rank 0: {' '.join(words)} 0U1<0")


def run(options: argparse.Namespace, definition: ScheduleDefinition) -> tuple[float, float, list[float]]:
    """The seconds of a step, the bytes that it takes at most, and the losses of the first steps."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    with torch.device(options.device):
        model = Blocks(options.width).to(dtype)
    x = torch.randn(2 * MICROBATCHES, options.tokens // 2, options.width, device=options.device, dtype=dtype)
    y, loss_fn = torch.zeros_like(x), F.mse_loss
    pipe = penstock.Pipeline(
        model, (x[:2],), loss_fn, lambda params: torch.optim.SGD(params, lr=1e-3),
        microbatches=MICROBATCHES, stages=1, schedule=definition, check="off",
    )  # fmt: skip
    losses = [float(pipe.step(x, y).loss) for _ in range(FIRST)]
    on_gpu = options.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    lasting = torch.cuda.memory_allocated() if on_gpu else 0
    seconds = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        float(pipe.step(x, y).loss)
        seconds.append(time.perf_counter() - begun)
    peak = torch.cuda.max_memory_allocated() - lasting if on_gpu else 0
    pipe.close()
    return statistics.median(seconds), peak, losses


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096, help="of a microbatch")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[4, 8])
    options = parser.parse_args()
    shown = Report(options.save)
    shown.add(conditions("benchmarks/offloads.py"))
    rows = []
    for in_flight in options.in_flight:
        away = range(in_flight, MICROBATCHES, 2)
        plain, most, expected = run(options, order(in_flight, (), 0))
        rows.append([str(in_flight), "", f"{plain:.3f} s", "", f"{most / 1e9:.2f} GB", ""])
        for ahead in (1, 2, 3):
            seconds, peak, losses = run(options, order(in_flight, away, ahead))
            same = "yes" if losses == expected else "NO"
            cost = f"{seconds / plain - 1:+.1%}"
            rows.append([str(in_flight), str(ahead), f"{seconds:.3f} s", cost, f"{peak / 1e9:.2f} GB", same])
    shown.add(table(["in flight", "back before", "step", "costs", "peak", "same losses"], rows))


if __name__ == "__main__":
    main()
