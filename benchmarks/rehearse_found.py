"""Rehearses trainings that a pipeline may train wrongly, or models that it trains rightly.

    python benchmarks/rehearse_found.py --save benchmarks/results/rehearse.txt
    nice -n 15 python benchmarks/rehearse_found.py --models 1300 --save benchmarks/results/rehearse-models.txt

The first command makes a table of the inputs in `tests/support/found_inputs.py`: the step of the way that has other
numbers, and the first of these. The second one rehearses models of `benchmarks/model_cases` for about as many seconds,
each in a process of its own, and says how many are equal, how many the pipeline refuses, and which are not equal.
"""

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import penstock
from measurement.reports import conditions
from model_cases.cases import Case
from model_cases.families import CASES, missing_packages, warm_up
from penstock.errors import PenstockError, RehearsalError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.found_inputs import FOUND  # noqa: E402

CASE_SECONDS = 400
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write what is printed to this file")
    parser.add_argument("--models", type=float, default=0.0, metavar="SECONDS", help="rehearse models of model_cases")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    machine, software, command = conditions("benchmarks/rehearse_found.py").splitlines()
    lines = [command, machine, software, ""]
    for line in _models(options.models) if options.models else _found():
        lines.append(line)
        print(line, flush=True)
    if options.save:
        options.save.write_text("\n".join(lines) + "\n")


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


def _models(seconds: float) -> Iterator[str]:
    """Every model once, in a random order, until the time is up."""
    cases = [case for case in CASES if not missing_packages(case) and case.between is None]
    random.Random(0).shuffle(cases)
    warm_up({case.family for case in cases})
    counts: Counter[str] = Counter()
    start = time.perf_counter()
    times: list[float] = []
    yield "models of benchmarks/model_cases, 2 stages, 1f1b-flush, beside a loop in microbatches:"
    for case in cases:
        if time.perf_counter() - start > seconds:
            break
        begin = time.perf_counter()
        text = _in_a_process(case)
        times.append(time.perf_counter() - begin)
        counts[text.partition(":")[0]] += 1
        if text != "equal":
            yield f"  {case.family}/{case.name}: {text}"
    summary = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    yield f"  {len(times)} of {len(cases)} models: {summary}; {sorted(times)[len(times) // 2]:.1f} s in the middle"


def _in_a_process(case: Case) -> str:
    context = get_context("fork")
    mine, other = context.Pipe(duplex=False)
    child = context.Process(target=_rehearse_case, args=(case, other))
    child.start()
    other.close()
    text = "no answer: out of time" if not mine.poll(CASE_SECONDS) else ""
    try:
        text = text or str(mine.recv())
    except EOFError:
        text = "no answer: the process ended"
    child.kill()
    child.join()
    return text


def _rehearse_case(case: Case, answer: Any) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    n, length = case.samples, case.lengths[0]
    counts = (
        (n * case.microbatches,) * 3 if not case.free_batch or case.microbatches == 1 else (3 * n - 1, 3 * n, 2 * n)
    )

    def make() -> dict[str, Any]:
        return {
            "model": case.build().train(),
            "batches": [(case.draw(count, length), None) for count in counts],
            "sample": case.draw(n, length),
            "loss_fn": case.loss,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            "microbatches": case.microbatches,
            "stages": 2,
        }

    try:
        answer.send(_outcome(make, accumulation=True))
    except BaseException as error:
        answer.send(f"raised: {type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main()
