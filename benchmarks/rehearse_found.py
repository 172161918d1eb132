"""Rehearses trainings that a pipeline may train wrongly.

    python benchmarks/rehearse_found.py --save benchmarks/results/rehearse.txt

Makes a table of the inputs in `tests/support/found_inputs.py`: the step of the way that has other numbers, and the
first of these.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import penstock
from measurement.reports import Report, conditions, option_parser
from penstock.errors import PenstockError, RehearsalError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.found_inputs import FOUND

UNSEEN = """\
what a rehearsal cannot see, by its nature:
  what the loop does between steps: a backward of its own that fills .grad, options of the optimizer that it changes
    beside lr_scheduler=, gradients of a second pipeline whose loss runs this model
  two processes, in a single one: values whose gradient, shape or type depends on the data; weights of another process
    that the loss reads (rehearse under torchrun)
  what loop and pipeline share, or pipeline and oracle: a layer of penstock.scan that mixes samples, a prediction of an
    update hook that has another shape
  checkpoints, launchers, files, signals, speed"""


def main() -> None:
    options = option_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    report = Report(options.save)
    report.add(conditions("benchmarks/rehearse_found.py"), "")
    for line in _found():
        report.add(line)


def _found() -> Iterator[str]:
    for found in FOUND:
        start = time.perf_counter()

        def make(make: Callable[[], dict[str, Any]] = found.make) -> dict[str, Any]:
            return {name: value for name, value in make().items() if name != "accumulation"}

        outcome = _outcome(make, accumulation=found.make().get("accumulation", False))
        yield f"{found.name}  ({time.perf_counter() - start:.1f} s)"
        yield from (f"    {line}" for line in outcome.splitlines())
    yield ""
    yield from UNSEEN.splitlines()


def _outcome(make: Callable[[], Any], **options: Any) -> str:
    """What a rehearsal says, in a line or two."""
    try:
        penstock.rehearse(make, **options)
    except RehearsalError as error:
        first, cause, *_ = str(error).splitlines()
        return f"found: {first}\n{cause[:140]} ..."
    except PenstockError as error:
        return f"refused: {type(error).__name__}: {' '.join(str(error).split())[:220]}"
    return "equal"


if __name__ == "__main__":
    main()
