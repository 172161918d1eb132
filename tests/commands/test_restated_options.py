"""Every command accepts what it does already: options that say its defaults change nothing."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.commands import COMMANDS
from penstock.values import LayerProfile, Plan, Profile
from support.paths import ROOT

FLEET = str(ROOT / "examples" / "fleet" / "fleet.yaml")
PLAN = "plan profile.json --devices 2 --bandwidth 1e9 --microbatches 2"
RESTATED = [
    (PLAN, "--synchronous --allreduce ring --optimizer-copies 2"),
    (f"{PLAN} --frontier", "--synchronous --straight --every-device --optimizer-copies 2"),
    ("simulate plan.yaml profile.json", "--update-seconds-per-byte 0 --allreduce ring --split-seconds 3e-4"),
    ("fleet allocate FLEET", "--policy water-filling"),
    ("fleet simulate FLEET", "--policy water-filling --round-seconds 360 --restart-seconds 5 --seed 0"),
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Profile(tuple(LayerProfile(f"l{n}", 1e-3, 2e-3, 30, 40, 50) for n in range(2)), 2).save("profile.json")
    Plan.uniform(2, 2).save("plan.yaml")


def printed(words: str, capsys: Any) -> str:
    assert main([FLEET if word == "FLEET" else word for word in words.split()]) == 0, capsys.readouterr().err
    return str(capsys.readouterr().out)


@pytest.mark.parametrize(("words", "restated"), RESTATED, ids=lambda words: words)
def test_what_is_so_already_changes_nothing(words: str, restated: str, capsys: Any) -> None:
    assert printed(f"{words} {restated}", capsys) == printed(words, capsys)


def test_no_command_has_an_option_that_changes_nothing(capsys: Any) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command.name, "--help"])
        assert not re.search("changes nothing|no effect", capsys.readouterr().out), command.name
