"""`penstock init`: the script that it writes trains, and takes the place of no file."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from support.fork_server import ForkServer

MODELS = """
import torch
from torch import nn
import penstock

class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

def batch():
    return torch.randn(8, 6), torch.arange(8) % 3

def make():
    x, y = batch()
    loss_fn = nn.functional.cross_entropy
    arguments = {"model": net(), "batches": [(x, y)] * 2, "sample": (x[:2],), "loss_fn": loss_fn}
    return {**arguments, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "microbatches": 4}

def own_batches():
    x, y = batch()
    return {**make(), "batches": [penstock.Microbatches([x, x], [y, y])], "microbatches": 2}

def pair():
    return net(), (batch()[0],)

def layers():
    return penstock.Subject(list(net()), batch()[0])

def subject():
    x, y = batch()
    return penstock.Subject(net(), x, loss_fn=nn.functional.cross_entropy, target=y)

def with_loss():
    x, y = batch()
    return WithLoss(), {"x": x, "labels": y}

def no_loss():
    return nn.Sequential(nn.Linear(6, 3), nn.LSTM(3, 3)), (batch()[0],)

def no_batches():
    return {name: value for name, value in make().items() if name != "batches"}
"""


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    yield Path("models.py")
    sys.modules.pop("penstock_subject_models", None)


@pytest.mark.sampled(2)
@pytest.mark.processes
@pytest.mark.parametrize("function", ["make", "own_batches", "pair", "layers", "subject", "with_loss"])
def test_the_loss_of_the_script_falls(function: str, fork_server: ForkServer, tmp_path: Path, capsys: Any) -> None:
    assert main(["init", f"models.py:{function}"]) == 0

    assert capsys.readouterr().out == "wrote train.py: start it with python, or with torchrun --nproc-per-node N\n"
    child = fork_server.start([str(tmp_path / "train.py")], {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path)
    printed, errors = child.communicate(timeout=120)
    assert (child.returncode, errors) == (0, "")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (.*)$", printed, flags=re.MULTILINE)]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert (tmp_path / "train.checkpoints" / "step-000020").is_dir()


@pytest.mark.processes
def test_every_script_has_a_folder_of_its_own(fork_server: ForkServer, tmp_path: Path, capsys: Any) -> None:
    """A copy of a script has one, too. A script with nothing left to do says so."""
    for name in ("one", "two"):
        assert main(["init", "models.py:make", "-o", f"{name}.py"]) == 0
    Path("three.py").write_text(Path("two.py").read_text())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    printed = {}
    for name in ("one", "two", "three", "two"):
        child = fork_server.start([str(tmp_path / f"{name}.py")], environment, tmp_path)
        printed[name], errors = child.communicate(timeout=120)

    folder = tmp_path / "two.checkpoints"
    assert {path.name for path in tmp_path.glob("*.checkpoints")} == {f"{name}.checkpoints" for name in printed}
    assert len(printed["one"].splitlines()) == len(printed["three"].splitlines()) == 20
    assert printed["two"] == f"{folder} has all 20 steps: delete it to begin anew, or raise STEPS\n"
    assert errors == f"{folder}: the training goes on after step 20\n"


def test_no_file_is_replaced_unasked(models: Path, capsys: Any) -> None:
    Path("train.py").write_text("mine")

    assert main(["init", "models.py:make"]) == 1
    assert Path("train.py").read_text() == "mine"
    assert main(["init", "models.py:make", "--force", "--json"]) == 0
    assert "from models import make\n" in Path("train.py").read_text()
    assert json.loads(capsys.readouterr().out)["script"] == "train.py"
    for options in ((), ("--force",)):
        assert main(["init", "models.py:make", "-o", "models.py", *options]) == 1
    assert models.read_text() == MODELS
    errors = capsys.readouterr().err
    assert "models.py: expected no file of that name, found one: give another --output, or --force" in errors


@pytest.mark.parametrize("target", ["kept.py", "missing.py"])
def test_a_link_is_not_written_through(target: str, tmp_path: Path, capsys: Any) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept.py").write_text("mine")
    Path("train.py").symlink_to(elsewhere / target)
    for options in ((), ("--force",)):
        assert main(["init", "models.py:make", *options]) == 1
        assert "train.py: expected no file of that name, found a link" in capsys.readouterr().err
    assert (elsewhere / "kept.py").read_text() == "mine"
    assert not (elsewhere / "missing.py").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["models.py:no_loss"], "models.py:no_loss: expected an output to compare with a target, or a loss, found"),
        (["models.py:no_batches"], "expected batches"),
        (["models.py:net"], "models.py:net returned an object of type Sequential"),
        (["models.py:make", "-o", "scripts/train.py"], "expected a name beside models.py, found a folder"),
        (["my-models.py:make"], "expected names that Python can import"),
        (["class.py:make"], "class.py:make: expected names that Python can import"),
        (["models.py:make", "-o", 'q""" + 1.py'], "expected a name of letters, digits and ._+-"),
        (["models.py:make", "-o", "a\\N.py"], "expected a name of letters, digits and ._+-"),
        (["models.py:make", "-o", "a\nb.py"], "expected a name of letters, digits and ._+-"),
        (["models.py:make", "-o=-c.py"], "expected a name of letters, digits and ._+-"),
        # The script would import itself in place of the module.
        (["models.py:make", "-o", "torch.py"], "that no module has which the script imports"),
        (["models.py:make", "-o", "pathlib.py", "--force"], "that no module has which the script imports"),
    ],
)
def test_refusals(arguments: list[str], text: str, capsys: Any) -> None:
    Path("my-models.py").write_text("def make(): ...")
    Path("class.py").write_text("def make(): ...")

    assert main(["init", *arguments]) == 1
    assert text in capsys.readouterr().err
    assert not Path("train.py").exists()
