"""Faults happen at the place that is asked for, once, and nowhere else; their text reads back."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import penstock
from penstock.scheduling.actions import Action, Update, parse
from penstock.testing import faults
from support import models
from support.fork_server import ForkServer


def make_pipeline(schedule: str = "1f1b-flush") -> penstock.Pipeline:
    """Two stages, two microbatches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    options: dict[str, Any] = {"schedule": schedule, "stages": 2, "microbatches": 2}
    return penstock.Pipeline(model, (torch.zeros(2, 4),), nn.functional.mse_loss, models.plain, **options)


def steps_until_error(given: list[faults.Fault], schedule: str = "1f1b-flush") -> tuple[int, str]:
    """How many of four steps are made, and the text of the error that ends them, with its notes."""
    pipe, x, number = make_pipeline(schedule), torch.ones(4, 4), 0
    with faults.inject(given):
        try:
            while number < 4:
                pipe.step(x, x)
                number += 1
            pipe.drain()
        except penstock.PenstockError as error:
            return number, "\n".join([str(error), *error.__notes__])
    return 4, ""


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw", "pipedream"])
@pytest.mark.parametrize(
    ("rank", "step", "action", "hit"), [(1, 2, "1B1", "1B5@"), (0, 3, "F", "0F6@"), (1, 0, "1F0", "1F0@")]
)
def test_an_error_is_raised_before_the_action_of_that_step(
    schedule: str, rank: int, step: int, action: str, hit: str
) -> None:
    steps, error = steps_until_error([faults.Raise(rank=rank, step=step, action=action)], schedule)

    # Under an asynchronous schedule the backwards of a minibatch belong partly to the next step.
    shown = re.search(r"rank (\d), step (\d), action (\S+): expected to go on", error)
    assert shown is not None
    assert (int(shown[1]), int(shown[2]), steps) == (rank, step, step)
    assert shown[3].startswith(hit if schedule == "1f1b-flush" or "B" not in action else "1B")
    assert f"this was action {shown[3]} of rank {rank}" in error
    assert f"raise rank={rank} step={step} action={action}" in error


def test_a_function_chooses_the_action() -> None:
    seen: list[Action] = []

    def third_version(action: Action) -> bool:
        seen.append(action)
        return isinstance(action, Update) and action.version == 3

    steps, error = steps_until_error([faults.Raise(rank=1, action=third_version)])

    assert steps == 2
    assert "step 2, action 1U3<2" in error
    assert {action.stage for action in seen} == {1}, "it sees the actions of its rank"


def test_a_fault_happens_once_and_the_rest_is_left() -> None:
    never = faults.Raise(rank=1, step=9)
    pipe, x = make_pipeline(), torch.ones(4, 4)
    with faults.inject([faults.Raise(rank=0, step=0), never]) as injected:
        with pytest.raises(faults.InjectedError):
            pipe.step(x, x)
        again = make_pipeline()
        again.step(x, x)

    assert injected.left == [never]


def test_nothing_happens_outside_of_the_block() -> None:
    with faults.inject([faults.Raise(rank=0)]):
        pass

    assert steps_until_error([])[0] == 4


@pytest.mark.parametrize(("restart", "steps"), [(0, 4), (1, 0), (None, 0)])
def test_only_the_named_run_of_a_job_is_hit(monkeypatch: pytest.MonkeyPatch, restart: int | None, steps: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")

    assert steps_until_error([faults.Raise(rank=0, restart=restart)])[0] == steps


def test_a_slow_rank_sleeps_at_every_action(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)

    assert steps_until_error([faults.Slow(rank=1, step=1, action="1F", seconds=7.0)])[0] == 4
    assert slept == [7.0, 7.0]


def test_a_fault_happens_before_a_change_of_a_file(tmp_path: Path) -> None:
    """What is done before it stays, as on a full disk."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with faults.inject([faults.Raise(rank=0, path="run/", change=2, error=full)]) as injected:
        (tmp_path / "run").mkdir()
        (tmp_path / "other").write_text("does not count")
        (tmp_path / "run" / "a").write_text("change 0")
        (tmp_path / "run" / "a").read_text()
        os.rename(tmp_path / "run" / "a", tmp_path / "run" / "b")
        with pytest.raises(OSError, match="No space left"):
            os.remove(tmp_path / "run" / "b")

    assert injected.left == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["b"]


KILLED = """
import torch, penstock
pipe = penstock.Pipeline(
    torch.nn.Linear(4, 4), (torch.zeros(2, 4),), torch.nn.functional.mse_loss,
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
for step in range(3):
    print(step, flush=True)
    pipe.step(torch.zeros(2, 4), torch.zeros(2, 4))
"""


def test_a_script_is_killed_by_the_environment(fork_server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, faults.FAULTS: "kill rank=0 step=1 action=B"}
    child = fork_server.start([str(script)], environment, tmp_path)
    printed, errors = child.communicate(timeout=120)

    assert (child.returncode, printed) == (-9, "0\n1\n"), errors


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill rank=1 step=3 action=2B0", faults.Kill(rank=1, step=3, action="2B0")),
        ("slow rank=0 action=U seconds=0.5", faults.Slow(rank=0, seconds=0.5, action="U")),
        ("signal rank=1 step=2 number=10", faults.Signal(rank=1, step=2, number=10)),
        ("signal rank=1", faults.Signal(rank=1)),
        ("raise rank=2 restart=any", faults.Raise(rank=2, restart=None)),
        ("stop rank=0 path='a run/step-000004' change=7", faults.Stop(rank=0, path="a run/step-000004", change=7)),
    ],
)
def test_the_text_of_a_fault_reads_back(text: str, expected: faults.Fault) -> None:
    assert faults.parse_faults(text) == [expected]
    assert faults.parse_faults(str(expected)) == [expected]
    assert faults.parse_faults(f"{text}; {text};") == [expected, expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kil rank=1", "Did you mean 'kill'"),
        ("kill step=1", "expected rank="),
        ("kill rank=1 stop=2", "Did you mean 'step'"),
        ("kill rank=1 rank=2", "at most once"),
        ("kill rank=one", "expected a number after rank="),
        ("slow rank=1", "expected seconds="),
        ("slow rank=1 seconds=nan", "expected a number of seconds"),
        ("kill rank=-1", "expected a number from 0"),
        ("kill rank=0 action=2X0", "expected stage, kind and microbatch"),
        ("kill rank=0 action=2U3", "without a microbatch U"),
        ("kill rank=0 change=3", "expected path= with it"),
        ("kill rank=0 path=run step=3", "neither step nor action"),
    ],
)
def test_an_unreadable_fault_is_refused(text: str, message: str) -> None:
    with pytest.raises(penstock.PenstockError, match=re.escape(message)):
        faults.parse_faults(text)


def test_what_is_no_fault_is_refused() -> None:
    wrong: Any = ["kill rank=1"]
    with pytest.raises(penstock.PenstockError, match="expected faults such as Kill"), faults.inject(wrong):
        pass


def test_every_action_has_a_form_that_can_be_chosen() -> None:
    for text in ("2F0@1", "2B0@1", "2I0@1", "2W0@1", "2U3<1", "2S0>3", "3R0<2", "0T1>3", "2N3>1", "2A3"):
        fault = faults.Kill(rank=0, action=text[:2])

        assert fault.fits(0, parse(text), 4)
        assert not fault.fits(0, parse(f"1{text[1:]}"), 4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: faults.Raise(rank=0, error=cast(Any, "text")), "raise error='text': expected an exception"),
        (lambda: faults.Raise(rank=0, error=cast(Any, ValueError)), "an exception, such as ValueError('text')"),
        (lambda: faults.Signal(rank=0, number=999), "signal number=999: expected that of a signal"),
        (lambda: faults.Signal(rank=0, number=0), "signal number=0: expected that of a signal"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(penstock.PenstockError) as caught:
        make()
    assert text in str(caught.value)
