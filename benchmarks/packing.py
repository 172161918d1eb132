"""Trains a language model on the functions of Python's standard library: padded, packed by tokens, packed by seconds.

    python benchmarks/packing.py --save benchmarks/results/packing.txt

A token is a byte of the source of a function (a method, too), up to `MOST` of them. Two processes have a stage each. In
every round all three ways train the same functions, in another order from round to round. Padded microbatches have
equally many functions, as they come, each as long as the longest of its microbatch. Packed ones have attention that
keeps to each function, which is computed function by function.
"""

import argparse
import ast
import json
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from measurement.launches import alone, launch_and_read
from measurement.reports import Report, conditions, option_parser, table

WIDTH, HEADS, BLOCKS, MOST = 64, 2, 2, 2048
FUNCTIONS, MICROBATCHES = 24, 6
"""Of a step."""
PROFILED = (256, 2048)
"""Tokens of the functions that a profile is measured with."""
WAYS = ("padded", "packed by tokens", "packed by seconds")


class Block(nn.Module):
    """A block of a transformer; attention looks at one sequence alone, which begins at each position 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        heads = self.attention(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        ends = (positions[0] == 0).nonzero()[1:, 0].tolist() if len(positions) == 1 else []
        parts = zip(*(each.tensor_split(ends, dim=2) for each in heads), strict=True)
        attended = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], dim=2)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(MOST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)


def count(target: Tensor) -> Tensor:
    return (target != -100).sum()


def read_functions() -> list[bytes]:
    """The sources of all functions of the modules at the top of the standard library, in the order of the files."""
    found = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
        found += ["".join(lines[node.lineno - 1 : node.end_lineno]).encode()[: MOST + 1] for node in nodes]
    return [each for each in found if len(each) > 1]


def measure(options: argparse.Namespace) -> dict[str, object]:
    """The seconds and the tokens of every step by each way, those that pad included."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    functions, draws = alone(read_functions), random.Random(0)
    profiles = alone(profile)
    texts = [draws.sample(functions, FUNCTIONS) for _ in range(options.steps + 1)]
    first = [torch.tensor(list(text)) for text in texts[0]]
    sample, _ = next(microbatches(first, WAYS[1], profiles))
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    tokens: dict[str, int] = dict.fromkeys(WAYS, 0)
    arguments = {"loss_fn": loss_of, "optimizer": torch.optim.AdamW, "loss_weight": count, "stages": 2, "check": "off"}
    torch.manual_seed(0)
    with penstock.Pipeline(Model(), sample, microbatches=MICROBATCHES, schedule="1f1b-flush", **arguments) as pipe:
        for number, chosen in enumerate(texts):
            sequences = [torch.tensor(list(text)) for text in chosen]
            for way in WAYS[number % 3 :] + WAYS[: number % 3]:
                batch = list(microbatches(sequences, way, profiles))
                dist.barrier()
                start = time.perf_counter()
                inputs, targets = zip(*batch, strict=True)
                float(pipe.step(penstock.Microbatches(list(inputs), list(targets))).loss)
                dist.barrier()
                # The first step of each is not counted.
                if number:
                    found[way].append(time.perf_counter() - start)
                    tokens[way] += sum(each[0].numel() for each in inputs)
    own = sum(len(text) - 1 for chosen in texts[1:] for text in chosen)
    lengths = sorted(map(len, functions))
    marks = [lengths[len(lengths) * part // 100] for part in (10, 50, 90, 99)]
    return {"seconds": found, "tokens": tokens, "own": own, "functions": len(functions), "lengths": marks}


def profile() -> dict[int, penstock.Profile]:
    """Profiles of a single function of each length."""
    return {
        length: penstock.profile(
            Model(), (torch.randint(256, (1, length)), torch.arange(length)[None]), iterations=2, progress=False
        )
        for length in PROFILED
    }


def microbatches(
    sequences: Sequence[Tensor], way: str, profiles: dict[int, penstock.Profile]
) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    """Inputs and target of each microbatch."""
    lengths = [len(each) - 1 for each in sequences]
    if way == WAYS[0]:
        each = len(sequences) // MICROBATCHES
        for start in range(0, len(sequences), each):
            most = max(lengths[start : start + each])
            group = [F.pad(own, (0, most + 1 - len(own)), value=-100) for own in sequences[start : start + each]]
            rows = torch.stack(group)
            yield (rows[:, :-1].clamp(min=0), torch.arange(most).expand(len(group), most)), rows[:, 1:].contiguous()
        return
    groups = penstock.pack(lengths, 1e-6 if way == WAYS[1] else profiles, microbatches=MICROBATCHES)
    for group in groups:
        made = penstock.packed_batch([sequences[place][:-1] for place in group])
        target = torch.cat([sequences[place][1:] for place in group])[None]
        yield (made["input_ids"], made["position_ids"]), target


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--steps", type=int, default=9, help="of each way, after one that is not counted")
    options = parser.parse_args()
    if options.worker is not None:
        found = measure(options)
        if dist.get_rank() == 0:
            options.worker.write_text(json.dumps(found))
        return
    report = Report(options.save)
    report.add(conditions("benchmarks/packing.py"))
    found = launch_and_read(__file__, 2, options)
    report.add(
        f"{found['functions']} functions; bytes at 10, 50, 90 and 99 % of them: {found['lengths']}. A GPT of {BLOCKS} "
        f"blocks of width {WIDTH}, 2 stages, 1f1b-flush, {FUNCTIONS} functions in {MICROBATCHES} microbatches"
    )
    middle = {way: statistics.median(seconds) for way, seconds in found["seconds"].items()}
    totals = {way: sum(seconds) for way, seconds in found["seconds"].items()}
    rows = [
        (
            way,
            f"{middle[way] * 1e3:.0f} ms",
            f"{found['own'] / totals[way]:.0f}",
            f"{totals['padded'] / totals[way]:.2f}",
            f"{totals['packed by tokens'] / totals[way]:.3f}",
            f"{1 - found['own'] / found['tokens'][way]:.0%}",
        )
        for way in WAYS
    ]
    head = ("way", "median step", "tokens/s", "against padded", "against tokens", "padding")
    report.add(table(head, rows))
    faster = [
        sum(one < other for one, other in zip(found["seconds"][WAYS[2]], found["seconds"][way], strict=True))
        for way in WAYS[:2]
    ]
    report.add(
        f"of {options.steps} steps, packed by seconds was faster than padded in {faster[0]}, than tokens in {faster[1]}"
    )


if __name__ == "__main__":
    main()
