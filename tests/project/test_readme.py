"""What the README shows is what there is: its snippets, its commands, and its diff of a loop."""

import ast
import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from support.fork_server import ForkServer
from support.paths import ROOT

pytestmark = pytest.mark.processes

README = (ROOT / "README.md").read_text()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def run(fork_server: ForkServer, arguments: list[str], folder: Path) -> str:
    """What a script prints; it must succeed, and have no errors to print."""
    child = fork_server.start(arguments, ENVIRONMENT, folder)
    printed, errors = child.communicate(timeout=300)

    assert (child.returncode, errors) == (0, "")
    return printed


@pytest.mark.slow
def test_the_quickstart_draws_its_schedule_and_learns(fork_server: ForkServer, tmp_path: Path) -> None:
    printed = run(fork_server, [str(ROOT / "examples" / "quickstart.py")], tmp_path)

    assert printed.startswith("1f1b-flush: 4 ranks, 4 microbatches a minibatch; 1 minibatch drawn\n")
    assert float(printed.split()[-1]) < 1


def test_saving_and_evaluating_works_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block, _ = blocks("python")
    x, y = torch.randn(8, 6), torch.arange(8) % 6
    optimizer = partial(torch.optim.SGD, lr=0.1)
    options = {"sample": (x[:2],), "loss_fn": torch.nn.functional.cross_entropy, "optimizer": optimizer}
    printed: list[tuple[Any, Any]] = []
    for steps in (1, 2):
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        names = {"penstock": penstock, "model": model, "options": {**options, "microbatches": 4}, "loader": [(x, y)]}
        exec(block, {**names, "print": lambda *shown: printed.append(shown)})
        assert Path(f"runs/1/step-{steps:06}").is_dir()
        # The last line has brought the trained weights into the model.
        assert model(x).shape == (8, 6)
        assert not any(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    (first, shape), (second, _) = printed
    assert float(second) < float(first)
    assert shape == (8, 6)
    assert list(Path("weights").glob("*.safetensors"))
    assert "pipe.gather_model()" in block
    assert len(block.splitlines()) == 7


def test_a_model_of_hugging_face_trains_and_is_saved_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    ids = torch.arange(32).view(4, 8)
    names: dict[str, Any] = {"model": GPT2LMHeadModel(config), "batch": {"input_ids": ids, "labels": ids}}
    exec(blocks("python")[1], {**names, "penstock": penstock, "torch": torch})

    saved = GPT2LMHeadModel.from_pretrained("trained").state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in names["model"].state_dict().items())
    assert len(blocks("python")[1].splitlines()) == 4


def test_training_loop_changes_in_six_lines() -> None:
    (diff,) = blocks("diff")
    lines = diff.splitlines()
    before, after = (
        "\n".join(line[1:] for line in lines if not line.startswith(side)) for side in ("+", "-")
    )  # fmt: skip

    assert all(line == "" or line[0] in " +-" for line in lines)
    assert sum(line.startswith("+") for line in lines) <= 6
    assert sum(line.startswith("-") for line in lines) <= 6
    ast.parse(before)
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(after)) if isinstance(node, ast.Call)}
    assert {"penstock.Pipeline", "pipe.step"} <= called


def test_both_sides_of_the_diff_train() -> None:
    (diff,) = blocks("diff")
    for side in ("+", "-"):
        program = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(side))
        torch.manual_seed(0)
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        names = {"model": torch.nn.Sequential(torch.nn.Linear(4, 3)), "loader": [(x, y)] * 2}
        exec(program, {**names, "print": lambda loss: None})


def test_set_up_commands_exist() -> None:
    commands = [shlex.split(line, comments=True)[0] for line in blocks("sh")[0].splitlines()]

    assert commands == ["./scripts/train", "./scripts/test"]
    for command in [*commands, "./scripts/check", ".ci/run"]:
        assert os.access(ROOT / command, os.X_OK), f"{command} cannot be executed"
        subprocess.run(["sh", "-n", command], cwd=ROOT, check=True)


@pytest.mark.slow
def test_command_line_works_as_shown(fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command = tmp_path / "penstock_command.py"
    command.write_text("from penstock.cli import main; raise SystemExit(main())")
    for line in blocks("sh")[1].splitlines():
        words = shlex.split(line, comments=True)

        assert words[0] == "penstock"
        assert run(fork_server, [str(command), *words[1:]], tmp_path)


def test_links_and_files_exist() -> None:
    named = re.findall(r"`((?:examples|configs|scripts|docs|tests)/[\w./]+)`", README) + re.findall(
        r"\]\(([^)#:]+)\)", README
    )

    assert [name for name in named if not (ROOT / name).exists()] == []
