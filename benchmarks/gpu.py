"""Times Penstock on one GPU, with a plain loop and torch's schedules beside it: one command, in under eight minutes.

    python benchmarks/gpu.py

Every schedule in one process, in two and in four that share the GPU; see gpu_benchmark/lineup.py. It needs no NCCL:
processes that share a GPU communicate over Gloo. A contender that fails, or that the deadline cuts off, is a row with
the reason.
"""

import argparse
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from gpu_benchmark.devices import driver_version, sharing_of
from gpu_benchmark.figures import Missing, Row, agreement, parameters_of, step_flops, tokens_of, value_of, with_versions
from gpu_benchmark.lineup import COMPILED, LAUNCHES, SIZES, contenders_of
from gpu_benchmark.series import Series
from gpu_benchmark.tables import legend, line_of, table
from gpu_benchmark.turns import Facts
from measurement.launches import conditions
from penstock.runtime.transport.backend_selection import SHARED_MEMORY

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Report:
    """What is known so far, and the files that say so: a benchmark that is cut short has written its figures."""

    size: str
    sharing: str
    """How several processes share the device."""
    json: Path
    save: Path
    head: str = field(default_factory=lambda: conditions("benchmarks/gpu.py"))
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))
    driver: str = field(default_factory=driver_version)
    facts: dict[int, Facts] = field(default_factory=dict)
    """By the launch, of those that have begun."""
    rows: list[Row | Missing] = field(default_factory=list)

    @property
    def device(self) -> str | None:
        """What its maker calls it; None until a process has seen it."""
        return next((one.device for one in self.facts.values()), None)

    def text(self) -> str:
        """All of it, for people."""
        size, rows = SIZES[self.size], with_versions(self.rows)
        eager = agreement([row for row in rows if isinstance(row, Row) and row.variant != COMPILED])
        rates = ", ".join(f"{one.matrix_flops / 1e12:.4g}" for one in self.facts.values())
        rest = (
            f"date: {self.date}\n"
            f"device: {self.device or 'unknown'}, driver {self.driver or 'none'}, CUDA {torch.version.cuda or 'none'}\n"
            f"products of bfloat16 matrices of {size.matrix} by {size.matrix}, by launch: {rates} TFLOP/s\n"
            f"several processes: {self.sharing}\n"
            f"model: {self.size}, {parameters_of(size.model):,} parameters, {size.model}\n"
            f"step: {size.microbatches} microbatches of {size.samples} samples, {tokens_of(size):,} tokens, "
            f"{step_flops(size) / 1e12:.4g} TFLOP by 6 N + 12 L H T a token (appendix B of PaLM); weights of float32, "
            f"autocast to bfloat16, AdamW\n"
            f"compiled rows: torch.compile with the backend {size.compiler}\n"
            f"first losses are the same within {eager:.1e} of themselves, with those of compiled rows within "
            f"{agreement(rows):.1e}"
        )
        return "\n\n".join([f"{self.head}\n{rest}", table(rows), legend(self.sharing)]) + "\n"

    def value(self) -> dict[str, Any]:
        """All of it, for machines."""
        size, rows = SIZES[self.size], with_versions(self.rows)
        return {
            "conditions": self.head.splitlines(),
            "date": self.date,
            "device": self.device,
            "driver": self.driver or None,
            "sharing": self.sharing,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "matrix_flops": [one.matrix_flops for one in self.facts.values()],
            "size": {"name": self.size, "parameters": parameters_of(size.model), **asdict(size)},
            "tokens": tokens_of(size),
            "step_flops": step_flops(size),
            "rows": [value_of(row) for row in rows],
        }

    def write(self) -> None:
        """Both files."""
        for path, text in ((self.json, json.dumps(self.value(), indent=1) + "\n"), (self.save, self.text())):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def expression(text: str) -> re.Pattern[str]:
    """`text`, compiled."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression, found {text!r}: {error}") from None


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only shows that all of it runs")
    parser.add_argument("--size", choices=SIZES, default="gpt-350m", help="of the model")
    parser.add_argument("--only", type=expression, metavar="REGEX", help="contenders in whose names it is found")
    parser.add_argument("--ranks", type=int, nargs="+", choices=[2, 4], default=[2, 4], help="of the pipelines")
    parser.add_argument("--deadline", type=float, default=450.0, help="seconds after which nothing is begun")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", help="the file for the rows")
    parser.add_argument("--save", type=Path, default=RESULTS / "gpu.txt", help="the file for the table")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none; --device cpu --size nano shows that the benchmark runs")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    launches = [one for one in LAUNCHES if one.ranks in options.ranks]
    size, end = SIZES[options.size], started + options.deadline
    lineup = [Series(launch, size, device, end, options.only) for launch in launches]
    if not any(series.contenders for series in lineup):
        names = dict.fromkeys(one.name for launch in launches for one in contenders_of(launch, size, device))
        parser.error(f"--only {options.only.pattern}: expected it in one of these names: {'; '.join(names)}")
    # Read when torch is imported, in the processes; on a CPU they are to talk as on a GPU.
    os.environ.update({"OMP_NUM_THREADS": "1", SHARED_MEMORY: "0"})
    report = Report(options.size, sharing_of(device), options.json, options.save)
    print(table([]), flush=True)
    for number, series in enumerate(lineup):
        for row in series.rows():
            if series.facts is not None:
                report.facts[number] = series.facts
            report.rows.append(row)
            report.write()
            print(line_of(row), flush=True)
    print(f"\n{report.text()}\ntook {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
