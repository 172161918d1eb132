"""Trains many models by a plain loop and by pipelines, and compares every number: the table of docs/models.md.

    python benchmarks/models.py --save docs/models.md

Each case is a process of its own with a limit of time and memory. Results are kept line by line in
results/models.jsonl, so that a run that was ended goes on where it stopped; `--only WORD` runs again those cases in
whose names the word is found. A package that is not installed leaves out its cases.
"""

import argparse
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import penstock
from model_cases.cases import Case
from model_cases.families import CASES, missing_packages, versions, warm_up
from model_cases.pages import outcome_of, page, summary
from model_cases.trials import try_case

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models.jsonl"
CPU_SECONDS = 90
WALL_SECONDS = 400
MEMORY_BYTES = 10 * 2**30


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="run these cases again: an expression found in family/name")
    parser.add_argument(
        "--again", metavar="OUTCOME", help="run again the cases of an outcome: wrong, or refused|internal"
    )
    parser.add_argument("--save", type=Path, metavar="PAGE", help="write the page from all results that there are")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON lines")
    parser.add_argument("--seconds", type=int, default=CPU_SECONDS, help="processor seconds of one case")
    parser.add_argument("--inside", action="store_true", help="run in this process, without limits: for a debugger")
    parser.add_argument("--list", action="store_true", help="only print the names")
    options = parser.parse_args()
    kept = _read(options.results)
    chosen = [
        case
        for case in CASES
        if (re.search(options.only, _key(case)) if options.only else _key(case) not in kept or options.again)
        and (not options.again or (_key(case) in kept and re.fullmatch(options.again, outcome_of(kept[_key(case)]))))
    ]
    if options.list:
        print("\n".join(map(_key, chosen)))
        return 0
    # One case of each family after the other, so that a run that is ended has seen something of each.
    before: Counter[str] = Counter()
    turns = {_key(case): (before[case.family], before.update([case.family])) for case in chosen}
    chosen.sort(key=lambda case: turns[_key(case)][0])
    for name in sorted({name for case in chosen for name in missing_packages(case)}):
        print(f"{name} is not installed: its cases are left out", flush=True)
    chosen = [case for case in chosen if not missing_packages(case)]
    if chosen:
        warm_up({case.family for case in chosen})
    for case in chosen:
        record = try_case(case, lambda record: None) if options.inside else _in_a_process(case, options.seconds)
        kept[_key(case)] = record
        _write(options.results, kept)
        print(summary(record), flush=True)
    if options.save:
        known = {_key(case): case for case in CASES}
        rest = len(known.keys() - kept.keys())
        facts = f"{versions()} Cases that have not been run: {rest}."
        options.save.write_text(page([record for key, record in kept.items() if key in known], facts))
    return int(any(outcome_of(record) == "wrong" for record in kept.values()))


def _key(case: Case) -> str:
    return f"{case.family}/{case.name}"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {f"{record['family']}/{record['case']}": record for record in records}


def _write(path: Path, kept: dict[str, dict[str, Any]]) -> None:
    order = {_key(case): number for number, case in enumerate(CASES)}
    records = sorted(kept.items(), key=lambda item: order.get(item[0], len(order)))
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(_without_folders(json.dumps(record)) + "\n" for _, record in records))
    fresh.replace(path)


def _without_folders(text: str) -> str:
    """`text` with files named from the folder of their package on."""
    for folder in sorted({*map(os.path.abspath, sys.path), str(ROOT)}, key=len, reverse=True):
        text = text.replace(folder + os.sep, "")
    return text


def _in_a_process(case: Case, seconds: int) -> dict[str, Any]:
    """The record of a case that runs in a copy of this process, in which the libraries are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "record.json"
        child = os.fork()
        if child == 0:
            _become(case, kept, seconds)
        code, reason = _wait(child)
        record = json.loads(kept.read_text()) if kept.exists() else {"case": case.name, "family": case.family}
        if code != 0:
            record["ended"] = reason or f"exit code {code}"
        return dict(record)


def _become(case: Case, kept: Path, seconds: int) -> None:
    """Runs the case in this process, which ends with it."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 2))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        output = kept.with_name("output.txt").open("w")
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        warnings.simplefilter("ignore")

        def keep(record: dict[str, Any]) -> None:
            kept.with_suffix(".new").write_text(json.dumps(record))
            kept.with_suffix(".new").replace(kept)

        keep(try_case(case, keep))
        code = 0
    except BaseException:
        kept.write_text(
            json.dumps({"case": case.name, "family": case.family, "crashed": traceback.format_exc()[-2000:]})
        )
        code = 0
    finally:
        os._exit(code)


def _wait(child: int) -> tuple[int, str]:
    """The exit code of a child, and why it was ended."""
    deadline = time.monotonic() + WALL_SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code, "the limit of processor time" if code in (-signal.SIGXCPU, -signal.SIGKILL) else ""
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL, "the limit of time"
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"penstock {penstock.__version__}, torch {torch.__version__}", flush=True)
    sys.exit(main())
