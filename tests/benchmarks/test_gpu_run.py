"""The command for a machine with a GPU ends in time and continues after failures; what it measures is not tested."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpu_probe.waits import CALLS, verdict
from gpu_run.children import Child
from gpu_run.parts import CLOSING_SECONDS, PARTS, WAITING, Group, Part, Program, Suite
from gpu_run.run import Record, run_part
from gpu_run.summary import COLUMNS, LINES, WIDTH, parts_in, summary, table
from gpu_run.tasks import NO_CARD, Row
from support.paths import ROOT

LONG = 60.0
"""Of tests that need no limit; a busy machine is slow."""


def run_script(folder: Path, *arguments: str) -> str:
    """The output of scripts/gpu where no card can be seen."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = ["scripts/gpu", *arguments, "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def part_of(*groups: Group, limit_seconds: float = 300.0) -> Part:
    """One that is tried here, with limits of its own."""
    return Part(1, "a trial", limit_seconds, groups)


def program(name: str, source: str, limit_seconds: float = LONG) -> Program:
    """`source` finds the name of its file as the first argument."""
    return Program(name, ("-c", source, "FOLDER/found.jsonl"), limit_seconds, "found.jsonl", needs_card=False)


def rows_of(record: Record) -> dict[str, Row]:
    """The rows by name, each of which is unique."""
    assert len({row.name for row in record.rows}) == len(record.rows)
    return {row.name: row for row in record.rows}


GOOD = "import json, sys; open(sys.argv[1], 'w').write(json.dumps({'kind': 'tried'}) + chr(10))"
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
open(sys.argv[1], "w").write(f'{{"child": {child.pid}}}\\n{{"cut o')
def wait_for_ever():
    time.sleep(1000)
wait_for_ever()
"""


# The parts


def test_the_parts_are_of_known_length() -> None:
    """A machine is lent for ten minutes at a time, and half an hour in all."""
    assert [part.number for part in PARTS] == [1, 2, 3]
    assert sum(part.limit_seconds for part in PARTS) <= 27 * 60
    for part in PARTS:
        assert part.limit_seconds <= 540
        assert sum(group.limit_seconds for group in part.groups) + CLOSING_SECONDS <= part.limit_seconds
        assert len({task.name for task in part.tasks}) == len(part.tasks)
        for group in part.groups:
            suites = [task.limit_seconds for task in group.tasks if isinstance(task, Suite)]
            assert sum(suites) <= group.limit_seconds
            assert all(task.limit_seconds <= group.limit_seconds for task in group.tasks)


def is_marked(file: Path) -> bool:
    """Whether ``pytest.mark.gpu`` stands in its code; a string does not count: it is the source of another test."""
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.gpu"
        for node in ast.walk(ast.parse(file.read_text()))
    )


def test_no_file_with_tests_for_a_gpu_is_forgotten() -> None:
    marked = {str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py") if is_marked(file)}
    in_order = [task.path for task in PARTS[1].tasks if isinstance(task, Suite)]

    assert len(marked) > 1
    assert sorted(in_order) == sorted(marked)
    assert in_order[0] == "tests/gpu/test_gpu.py"


def test_programs_are_there() -> None:
    for part in PARTS:
        for task in part.tasks:
            if isinstance(task, Program):
                assert (ROOT / task.arguments[0]).exists(), task.name
    assert tuple(CALLS) == WAITING


def test_a_call_that_takes_longer_than_the_spin_is_not_said_to_wait() -> None:
    assert verdict(0.1, 1.0, was_over=False) == "no"
    assert verdict(1.1, 1.0, was_over=True) == "yes"
    assert verdict(3.0, 1.0, was_over=True) == "unknown"


# Without a card


@pytest.mark.processes
@pytest.mark.slow
def test_every_part_ends_where_there_is_no_card(tmp_path: Path) -> None:
    run_script(tmp_path, "1", "3")
    reported = run_script(tmp_path, "2", "--only", "test_data")
    found = parts_in(tmp_path)

    assert [part["part"] for part in found] == [1, 2, 3]
    for part in found:
        rows = {row["name"]: row for row in part["rows"]}
        assert rows.pop("environment")["status"] == "done"
        assert part["environment"]["python"]
        assert part["environment"]["devices"] == []
        assert part["environment"]["unknown"].keys() >= {"driver"} or part["environment"]["driver"]
        assert {row["status"] for row in rows.values()} == {"skipped"}
        if part["part"] == 2:
            assert list(rows) == ["test_data.py"]
            assert rows["test_data.py"]["reason"] == "needs a CUDA device"
            assert rows["test_data.py"]["counts"]["skipped"] >= 2
        else:
            assert set(rows) == {task.name for task in PARTS[part["part"] - 1].tasks} - {"environment"}
            assert {row["reason"] for row in rows.values()} == {NO_CARD}
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {f"part-{number}.{kind}" for number in (1, 2, 3) for kind in ("json", "log")} | {"summary.txt"}
    assert (tmp_path / "summary.txt").read_text() in reported
    assert NO_CARD in reported


@pytest.mark.processes
def test_without_arguments_the_parts_are_listed(tmp_path: Path) -> None:
    reported = run_script(tmp_path)
    for part in PARTS:
        assert f"{part.number}   {part.title} (at most 540 s)" in reported
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_two_processes_meet_without_nccl(tmp_path: Path) -> None:
    """A scene, over Gloo: a mistake in what all scenes share would cost a run on a card."""
    found = tmp_path / "found.jsonl"
    ending = Child(
        ["benchmarks/gpu_probe/pairs.py", "late", "--backend", "gloo", "--found", str(found)], tmp_path, LONG
    ).wait()
    assert (ending.code, ending.overdue) == (0, ""), (tmp_path / "output.txt").read_text()
    (note,) = [json.loads(line) for line in found.read_text().splitlines()]
    assert (note["name"], note["unit"]) == ("communicator made behind a pending receive", "s")


# What goes wrong


@pytest.mark.processes
@pytest.mark.slow
def test_the_next_one_runs_whatever_becomes_of_a_program(tmp_path: Path) -> None:
    tasks = (
        program("hangs", HANGS, 5.0),
        program("fails", "import sys\nprint('working')\nraise ValueError('the reason')"),
        program("dies", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"),
        program("leaves nothing", "print('nothing')"),
        program("leaves no JSON", "import sys; open(sys.argv[1], 'w').write('no JSON')"),
        program("works", GOOD),
    )
    record = run_part(part_of(Group("all", 200, tasks, at_once=4)), tmp_path)
    rows = rows_of(record)
    log = (tmp_path / "part-1.log").read_text()

    assert rows.keys() == {task.name for task in tasks}
    assert (rows["hangs"].status, rows["hangs"].reason) == ("overdue", "not done after 5 s")
    # What it had found by then counts, and its stack says where it was.
    (found,) = rows["hangs"].found
    assert "in wait_for_ever" in log
    assert not _runs(found["child"])
    assert (rows["fails"].status, rows["fails"].reason) == ("failed", "exit code 1: ValueError: the reason")
    assert "working" in log
    assert (rows["dies"].status, rows["dies"].reason) == ("failed", "exit code -9: it said nothing")
    assert rows["leaves nothing"].reason == "it left no found.jsonl"
    assert rows["leaves no JSON"].reason.startswith("found.jsonl: ")
    assert (rows["works"].status, rows["works"].found) == ("done", [{"kind": "tried"}])
    assert json.loads((tmp_path / "part-1.json").read_text())["rows"][-1]["status"]


def _runs(pid: int) -> bool:
    """Whether the process runs; a zombie that its new parent has not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.processes
def test_a_part_ends_in_time(tmp_path: Path) -> None:
    """A task that runs when the limit is near is ended; a task that was not begun by then is a row, too."""
    tasks = (program("hangs", "import time; time.sleep(1000)", 2.0), program("comes too late", GOOD, 4.0))
    record = run_part(part_of(Group("all", 3, tasks), limit_seconds=CLOSING_SECONDS + 5.0), tmp_path)
    rows = rows_of(record)

    assert rows["hangs"].status == "overdue"
    assert rows["comes too late"].status == "unreached"


SUITE = """
import os, signal, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.gpu
processes = Path(__file__).parent / "processes"

def note(name):
    with processes.open("a") as lines:
        lines.write(f"{name} {os.getpid()}\\n")

def test_passes():
    note("passes")
def test_fails():
    assert 1 == 2, "one is not two"
def test_is_skipped():
    pytest.skip("no reason")
@pytest.mark.xfail(reason="expected")
def test_is_expected_to_fail():
    assert False
@pytest.mark.parametrize("way", ["hang", "die", "leave"])
def test_ends_badly(way):
    if way == "hang":
        time.sleep(1000)
    if way == "leave":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL)
def test_follows():
    note("follows")
def test_spoils_the_device():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_comes_last():
    note("comes last")
@pytest.fixture
def broken():
    raise ValueError("a broken fixture")
def test_cannot_begin(broken):
    pass
"""


@pytest.mark.processes
@pytest.mark.slow
def test_one_bad_test_costs_one_row(tmp_path: Path) -> None:
    """After a test that hangs, dies or spoils the device, the others continue in a new process."""
    file = tmp_path / "test_trial.py"
    file.write_text(SUITE)
    suite = Suite("trial", str(file), LONG, silence_seconds=12.0)
    (row,) = run_part(part_of(Group("all", 200, (suite,))), tmp_path).rows
    outcomes = {test["test"].rpartition("::")[2]: (test["outcome"], test["reason"]) for test in row.tests}
    processes = dict(line.rsplit(" ", 1) for line in (tmp_path / "processes").read_text().splitlines())

    assert outcomes == {
        "test_passes": ("passed", ""),
        "test_fails": ("failed", "AssertionError: one is not two"),
        "test_is_skipped": ("skipped", "no reason"),
        "test_is_expected_to_fail": ("xfailed", "assert False"),
        "test_ends_badly[hang]": ("hung", "silent for 12 s"),
        "test_ends_badly[die]": ("crashed", "its process ended with -9"),
        "test_ends_badly[leave]": ("crashed", "its process ended with 1"),
        "test_follows": ("passed", ""),
        "test_spoils_the_device": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        "test_comes_last": ("passed", ""),
        "test_cannot_begin": ("failed", "ValueError: a broken fixture"),
    }
    assert row.counts == {"passed": 3, "failed": 3, "skipped": 1, "xfailed": 1, "hung": 1, "crashed": 2}
    assert (row.status, row.reason) == ("failed", "test_fails: AssertionError: one is not two")
    assert len(set(processes.values())) == 3
    log = (tmp_path / "part-1.log").read_text()
    assert "in test_ends_badly" in log
    assert "one is not two" in log


@pytest.mark.processes
def test_a_file_that_cannot_be_read_is_a_row(tmp_path: Path) -> None:
    file = tmp_path / "test_trial.py"
    file.write_text("import no_such_module_anywhere\n")
    other = tmp_path / "test_other.py"
    other.write_text("def test_unmarked():\n    pass\n")
    suites = (Suite("broken", str(file), LONG), Suite("unmarked", str(other), LONG))
    rows = rows_of(run_part(part_of(Group("all", 200, suites)), tmp_path))

    assert rows["broken"].status == "failed"
    assert "no_such_module_anywhere" in rows["broken"].reason
    assert (rows["unmarked"].status, rows["unmarked"].reason) == ("failed", "no test was selected")


@pytest.mark.processes
@pytest.mark.slow
def test_a_file_whose_time_was_up_goes_on_where_it_was(tmp_path: Path) -> None:
    slow = tmp_path / "test_slow.py"
    slow.write_text(
        "import time, pytest\n@pytest.mark.gpu\n@pytest.mark.parametrize('n', range(5))\n"
        "def test_slow(n):\n    time.sleep(0.4)\n"
    )
    quick = tmp_path / "test_quick.py"
    quick.write_text("import pytest\n@pytest.mark.gpu\ndef test_quick():\n    pass\n")
    suites = (Suite("slow", str(slow), 1.5), Suite("quick", str(quick), LONG))
    rows = run_part(part_of(Group("all", 200, suites)), tmp_path).rows

    assert [(row.name, row.status, row.counts) for row in rows] == [
        ("quick", "done", {"passed": 1}),
        ("slow", "done", {"passed": 5}),
    ]


# The summary


def made_up(number: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A part's file. Nothing in it was measured."""
    card = {"name": "A card with a long name, 80 GB of memory and more", "memory_bytes": 80 * 2**30}
    environment = {
        "date": f"2000-01-0{number} 00:00 UTC",
        "commit": "0" * 12,
        "driver": "1.2.3",
        "torch": "9.9.9",
        "cuda": "9.9",
        "nccl": "9.9.9",
        "cpus": 99,
        "devices": [card] * 2,
    }
    done = {"name": "a task", "status": "done", "reason": "", "seconds": 1.0, "found": [], "counts": {}, "tests": []}
    return {
        "part": number,
        "title": "made up",
        "limit_seconds": 540,
        "seconds": 99.0,
        "command": f"scripts/gpu {number} --only 'a|b'",
        "environment": environment,
        "rows": [{**done, **row} for row in rows],
    }


@pytest.fixture
def found_files(tmp_path: Path) -> Path:
    """Two parts that ran on different days, with everything in them that there may be, and much of it."""
    queues = [
        {"kind": "queue", "connections": name, "priority": priority, "first": first, "streams": streams, "held": 1}
        for name in ("unset", "8", "32")
        for priority in (0, -1)
        for first in ("spins", "waits")
        for streams in (4, 8, 12, 16, 24, 32)
    ]
    costs = [{"kind": "cost", "name": name, "microseconds": 1.25} for name in ("kernel (add_)", "300 add_", "other")]
    waits = [
        {"kind": "wait", "name": name, "loading": loading, "waits": waits}
        for name, waits in (("synchronize", "yes"), ("matmul", "no"), ("torch.compile", "unknown"))
        for loading in ("LAZY", "EAGER")
    ]
    pools = [{"kind": "pool", "priority": 0, "repeats_after": 32, "different": 32}]
    pairs = [{"kind": "pair", "name": f"a thing {n} that two do", "value": n, "unit": "s"} for n in range(60)]
    first = [
        {"found": costs + waits + queues + pools + pairs},
        *({"name": f"task {n}", "status": "overdue", "reason": f"not done after {n} s"} for n in range(30)),
        *({"name": f"skipped {n}", "status": "skipped", "reason": "one reason"} for n in range(30)),
    ]
    tests = [{"test": f"a::test_{n}", "outcome": "failed", "seconds": 1.0, "reason": "x" * 300} for n in range(9)]
    row = {"tokens_per_second": 1e6, "over_plain": 0.5, "share_of_matrix": 0.25, "host_per_action": 1e-5}
    benchmark = {"matrix_flops": [1e15], "rows": [{"name": "plain loop", **row}, {"name": "other", "reason": "none"}]}
    second = [
        {"name": "a file", "status": "failed", "reason": "x", "counts": {"passed": 7, "failed": 9}, "tests": tests},
        {"name": "another", "counts": {"passed": 2, "skipped": 3, "hung": 1}},
        {"name": "benchmark", "found": [benchmark]},
    ]
    for number, rows in ((1, first), (2, second)):
        folder = tmp_path / f"day-{number}"
        folder.mkdir()
        (folder / f"part-{number}.json").write_text(json.dumps(made_up(number, rows)))
    return tmp_path


def test_the_summary_is_one_screen(found_files: Path) -> None:
    text = summary(parts_in(found_files))
    lines = text.splitlines()

    assert len(lines) <= LINES
    assert max(map(len, lines)) <= WIDTH
    for reported in (
        "part 1: 99 of 540 s, 2000-01-01 00:00 UTC",
        "part 2: 99 of 540 s",
        "launch 1.25",
        "LAZY: of 3 calls wait for a spin: synchronize, torch.compile (?)",
        "held up, connections 32",
        "a thing 0 that two do 0 s",
        "1000 TFLOP/s",
        "plain loop                     1,000,000 tokens/s, 0.500 x plain, 25.0% of products, 10 us/action",
        "task 0: overdue: not done after 0 s",
        "more in part-N.json",
    ):
        assert reported in text, reported


def test_the_table_is_one_of_markdown(found_files: Path) -> None:
    head, rule, *rows = table(parts_in(found_files)).splitlines()

    assert [cell.strip() for cell in head.strip("|").split("|")] == list(COLUMNS)
    assert set(rule) == set("|- ")
    assert len(rows) == 2
    for line in rows:
        assert line.count("|") == len(COLUMNS) + 1
    assert "| 9 / 10 / 3, 1 hung |" in rows[1]
    assert "| 2000-01-02, 000000000000 |" in rows[1]
    assert "launch 1.25" in rows[0]
    assert "plain loop 0.500 x plain" in rows[1]


def test_the_latest_file_of_a_part_counts(found_files: Path) -> None:
    later = made_up(2, [])
    later["environment"]["date"] = "2000-02-01 00:00 UTC"
    (found_files / "part-2.json").write_text(json.dumps(later))

    assert [part["environment"]["date"][:10] for part in parts_in(found_files)] == ["2000-01-01", "2000-02-01"]
