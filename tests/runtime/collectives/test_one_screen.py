"""An error of several ranks is read on one screen: one rank tells it, and the others a line each."""

import os
import re
from pathlib import Path

import pytest

from support.fork_server import Child, ForkServer

SCRIPT = """
import sys
import torch
from torch import nn
import penstock

class Layer(nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), fails

    def forward(self, x):
        if self.fails and not torch.compiler.is_exporting() and len(x) == 3:
            raise ValueError("the layer is tired")
        return self.linear(x)

def main(way):
    torch.manual_seed(0)
    model = nn.Sequential(Layer(False), Layer(way == "layer"))
    options = {"sample": (torch.zeros(2, 4),), "loss_fn": nn.functional.mse_loss, "check": "off"}
    if way == "sample":
        options["sample"] = (torch.zeros(2, 5),)
    if way == "argument":
        options["schedule"] = "1f1b-flash"
    if way == "file":
        penstock.Plan.load("no.yaml")
    with penstock.Pipeline(model, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options) as pipe:
        pipe.step(torch.zeros(2, 4), torch.zeros(2, 4))
        if way == "script" or (way == "one" and pipe.rank == 0):
            raise KeyError("no such column")
        pipe.step(torch.zeros(3, 4), torch.zeros(3, 4))

if sys.argv[1] == "hook":
    sys.excepthook = lambda kind, error, trace: print("my own hook", file=sys.stderr)
main(sys.argv[1].replace("hook", "layer"))
"""
OUR_FOLDER = "/src/penstock/"


def errors_of(children: list[Child]) -> list[str]:
    answers = [child.communicate(60) for child in children]
    assert all(child.returncode == 1 for child in children)
    # At the exit of a process Triton, which CUDA builds of PyTorch 2.15 have, tells what it has not freed.
    return [errors.partition("nanobind: leaked")[0] for _, errors in answers]


def start(fork_server: ForkServer, folder: Path, way: str) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    return errors_of(fork_server.start_ranks([str(folder / "train.py"), way], 2, folder))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "sentence", "own"),
    [
        ("layer", "rank 1 failed in a step: ValueError: the layer is tired", "train.py, line 14, in forward: raise"),
        ("one", "rank 0 failed outside the pipeline: KeyError: 'no such column'", "train.py, line 30, in main: raise"),
        ("script", r"rank \d failed outside the pipeline: KeyError: 'no such column'", "train.py, line 30, in main: r"),
        ("argument", r"rank \d failed building the pipeline: PlanError: ", "train.py, line 27, in main: with pens"),
        (
            "file",
            "rank 0 failed outside the pipeline: PlanError: no.yaml: no such file",
            "train.py, line 26, in main: ",
        ),
        ("sample", r"rank \d failed building the pipeline: CaptureError: ", "train.py, line 15, in forward: return"),
    ],
)
def test_an_error_is_read_on_one_screen(
    fork_server: ForkServer, tmp_path: Path, way: str, sentence: str, own: str
) -> None:
    printed = sorted(start(fork_server, tmp_path, way), key=lambda text: text.count("\n"))

    line, screen = printed[0].splitlines(), printed[1].splitlines()
    assert len(line) == 1
    assert re.match(r"rank \d at train\.py, line \d+, in \w+: ", line[0])
    assert re.match(sentence, screen[0])
    assert screen[0].partition(": ")[2][:20] in line[0]
    assert len(screen) < 12
    assert own in printed[1]
    assert OUR_FOLDER not in printed[1]
    for text in (line[0].rstrip(")"), screen[-1]):
        file = Path(text.rpartition("the whole traceback: ")[2])
        assert "Traceback (most recent call last)" in file.read_text()
        file.unlink()


@pytest.mark.processes
@pytest.mark.parametrize(("way", "expected"), [("layer", OUR_FOLDER), ("hook", "my own hook\n")])
def test_the_whole_traceback_and_own_hooks_stay(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, expected: str
) -> None:
    if way == "layer":
        monkeypatch.setitem(os.environ, "PENSTOCK_TRACEBACK", "full")

    for errors in start(fork_server, tmp_path, way):
        assert expected in errors
        assert "the whole traceback" not in errors
