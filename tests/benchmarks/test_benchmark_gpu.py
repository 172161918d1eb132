"""The benchmark of GPUs runs on a CPU, with real processes over Gloo; what it measures is not tested."""

import pytest

import gpu
from contenders.torch_contenders import METHODS as TORCH_METHODS
from measurement.crews import Crew, Failed
from penstock.scheduling import METHODS
from support.jobs.benchmark_jobs import prepare_fragile

pytestmark = pytest.mark.processes

ALONE = ["plain loop", "penstock, one stage", *gpu.IN_ONE_PROCESS]
TOGETHER = ["torch DDP", *TORCH_METHODS, *(f"penstock {method.name}" for method in METHODS)]
OWN_LOSSES = {"torch DDP", "penstock pipedream"}
"""The former tells no losses, and the latter updates between the microbatches of the first step."""


def run(capsys: pytest.CaptureFixture[str], *options: str) -> list[tuple[str, int, str]]:
    """The name, the number of processes and the rest of each row."""
    gpu.main(["--device", "cpu", "--seconds", "1", "--limit", "300", *options])
    head, _, rest = capsys.readouterr().out.partition(f"{gpu.HEAD}\n")
    assert "torch " in head and "command: " in head
    return [(line[:24].rstrip(), int(line[24:30]), line[30:]) for line in rest.partition("\n\n")[0].splitlines()]


@pytest.mark.sampled(0)
@pytest.mark.slow
def test_every_contender_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys)

    assert [row[:2] for row in rows] == [(name, 1) for name in ALONE] + [(name, 2) for name in TOGETHER]
    losses = {1: [], 2: []}
    for name, processes, rest in rows:
        *figures, peak, reserved, loss = rest.split()
        assert len(figures) == 7, rest
        assert all(float(one.rstrip("x%").replace(",", "")) >= 0 for one in figures), rest
        assert (peak, reserved) == ("-", "-")
        if name not in OWN_LOSSES:
            losses[processes].append(float(loss))
    for found in losses.values():
        assert found == pytest.approx([found[0]] * len(found), rel=1e-3)


def test_what_does_not_fit_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """No process is started for it."""
    (row,) = run(capsys, "--only", "torch interleaved$", "--processes", "3")
    assert row == ("torch interleaved", 3, "  left out: 4 layers cannot be cut into 6 stages")


def test_what_takes_too_long_does_not_end_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    rows = run(capsys, "--only", "plain|penstock gpipe", "--processes", "1", "--limit", "0.01")
    assert [row[0] for row in rows] == ["plain loop", "penstock gpipe"]
    assert {row[2] for row in rows} == {"  failed: no answer from rank 0 within 0.01 s"}


@pytest.mark.parametrize(
    ("order", "limit_seconds", "reason"),
    [
        ("raise", 120.0, "ValueError: expected nothing of the kind"),
        ("die", 120.0, "rank 1 ended with exit code 7"),
        ("hang", 2.0, "no answer from rank"),
    ],
)
def test_processes_that_fail(order: str, limit_seconds: float, reason: str) -> None:
    crew = Crew(2, prepare_fragile, (2,), limit_seconds, gpu=False)
    with pytest.raises(Failed, match=reason):
        crew.ask(order)
    crew.close()
    assert all(process.exitcode is not None for process in crew._processes)
