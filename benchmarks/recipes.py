"""Runs every recipe beside the plain script that it was: the same losses, seconds of a step and memory of a process.

    nice -n -20 python benchmarks/recipes.py --save benchmarks/results/recipes.txt

The plain script has one process with one thread, the pipeline two with a thread each. Seconds are medians over the
steps after the first three. Memory: the most that the fullest process has resident, beyond the imports of the script.
"""

import difflib
import importlib.util
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from measurement.reports import Report, conditions, option_parser, table

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
NAMES = tuple(sorted(path.stem for path in (RECIPES / "plain").glob("*.py")))
NEEDED = {"lightning_fit": "lightning", "qlora": "bitsandbytes"}
"""By recipe, the package that not every job of CI installs."""
INSTALLED = tuple(name for name in NAMES if name not in NEEDED or importlib.util.find_spec(NEEDED[name]))
_LINE = re.compile(r"loss ([\d.]+), ([\d.]+) s")
_WARM_UP = 3
_MARK = "most resident:"
_WRAPPER = f"""
import runpy, sys
from measurement.resident_memory import resident_bytes, return_what_is_freed
import torch, sklearn.datasets, peft, transformers.models.llama.modeling_llama, transformers.models.t5.modeling_t5
import penstock.capturing.export.exported, penstock.pipeline, torch._dynamo, torch.export._trace
return_what_is_freed()
before = resident_bytes("VmRSS")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("{_MARK}", resident_bytes("VmHWM") - before, flush=True)
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What a script printed: its losses, the median seconds of a step, and the bytes of the fullest process."""

    losses: tuple[float, ...]
    seconds: float
    resident: int


def run(script: Path, processes: int, *arguments: str) -> Run:
    """Runs `script` in `processes` processes. Raises `CalledProcessError` if one fails."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--no-python", "--nproc-per-node", str(processes)]
    command = [sys.executable, *launcher] if processes > 1 else []
    wrapped = [*command, sys.executable, "-c", _WRAPPER, str(script), *arguments]
    printed = subprocess.run(wrapped, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = [(float(loss), float(seconds)) for loss, seconds in _LINE.findall(printed)]
    # Every process prints every loss.
    losses = tuple(dict.fromkeys(loss for loss, _ in found))
    resident = max(map(int, re.findall(rf"{_MARK} (\d+)", printed)))
    timed = found[_WARM_UP * processes :] or found
    return Run(losses, statistics.median(seconds for _, seconds in timed), resident)


def changes(name: str) -> str:
    """The lines of the recipe that differ from the plain script."""
    plain, pipelined = ((RECIPES / kind / f"{name}.py").read_text().splitlines() for kind in ("plain", "pipelined"))
    lines = difflib.unified_diff(plain, pipelined, lineterm="", n=1)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def title(name: str) -> str:
    """The first line of the recipe."""
    return (RECIPES / "plain" / f"{name}.py").read_text().partition("\n")[0].strip('"')


def row(name: str, steps: int, width: int) -> list[str]:
    arguments = "--steps", str(steps), "--width", str(width)
    plain, pipelined = (
        run(RECIPES / kind / f"{name}.py", processes, *arguments)
        for kind, processes in (("plain", 1), ("pipelined", 2))
    )
    difference = max(abs(a - b) / a for a, b in zip(plain.losses, pipelined.losses, strict=True))
    memory = [f"{each.resident / 1e6:.0f} MB" for each in (plain, pipelined)]
    return [
        name,
        f"{difference:.0e}",
        f"{plain.seconds:.3f} s",
        f"{pipelined.seconds:.3f} s",
        f"{plain.seconds / pipelined.seconds:.2f}",
        *memory,
    ]


def page() -> str:
    """The lines that differ, for the site: below the introduction of docs/recipes.md."""
    return "\n".join(f"## {name}.py\n\n{title(name)}\n\n```diff\n{changes(name)}\n```\n" for name in NAMES)


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=INSTALLED)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    options = parser.parse_args()
    shown = Report(options.save)
    shown.add(conditions("benchmarks/recipes.py"))
    head = ["recipe", "losses differ by", "plain", "pipeline", "faster", "plain", "pipeline, a process"]
    rows, failed = list[list[str]](), list[str]()
    for name in options.only:
        try:
            rows.append(row(name, options.steps, options.width))
            print(*rows[-1], flush=True)
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} failed with exit code {error.returncode}: its error is on stderr")
    shown.add(table(head, rows), *failed)
    for name in sorted({*NAMES} - {*INSTALLED}):
        shown.add(f"{name} was left out: pip install {NEEDED[name]}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
