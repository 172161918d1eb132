"""Names from models, files and other processes command no terminal: they are shown with their characters escaped."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock import LayerProfile, PenstockError, Plan, Profile, TransportError
from penstock.cli import main
from penstock.errors import visible

HOSTILE = "red\x1b[31m\x1b]0;title\x07\x9b2J\u202e\r\n\x00end"
SHOWN = r"red\x1b[31m\x1b]0;title\x07\x9b2J\u202e\r\n\x00end"


def test_what_is_not_printed_is_escaped() -> None:
    assert visible(HOSTILE) == SHOWN
    assert visible("größe 層 [x] 'a' \\n") == "größe 層 [x] 'a' \\n"
    assert visible("one\n\ttwo\x1b", lines=True) == "one\n\ttwo\\x1b"


@given(st.text(st.characters()))
def test_every_text_becomes_printable(text: str) -> None:
    assert visible(text).isprintable()
    assert visible(visible(text)) == visible(text)
    visible(text).encode("utf-8")


def test_errors_keep_their_lines_and_nothing_else_that_is_not_printed() -> None:
    error = TransportError(f"rank 1 failed: {HOSTILE}\n  line 2")

    assert str(error) == f"rank 1 failed: {SHOWN.replace(chr(92) + 'n', chr(10))}\n  line 2"
    assert PenstockError("text", 3).args == ("text", 3)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str, Path]:
    """A plan and a profile with names of this kind, and a directory."""
    layers = [LayerProfile(f"{HOSTILE} {number}", 1.0, 2.0, 8, 8, 8) for number in range(2)]
    profile = Profile(tuple(layers), microbatch_size=1, name=HOSTILE, device=HOSTILE)
    profile.save(tmp_path / "profile.json")
    Plan.uniform(2, 2).save(tmp_path / "plan.yaml")
    return str(tmp_path / "plan.yaml"), str(tmp_path / "profile.json"), tmp_path


def test_tables_show_names_escaped(files: tuple[str, str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, profile, _ = files
    assert main(["show", profile]) == 0
    out = capsys.readouterr().out

    assert all(line.isprintable() for line in out.split("\n"))
    assert f"{SHOWN} 0" in out and f"profile of {SHOWN}, {SHOWN}: 2 layers" in out
    assert len(out.split("\n")) == 6, "a title, a head, two layers, the sums, and the end"


def test_pictures_of_hostile_names_can_be_read(files: tuple[str, str, Path]) -> None:
    plan, profile, folder = files
    assert main(["show", plan, profile, "--map", str(folder / "map.svg"), "--svg", str(folder / "timeline.svg")]) == 0
    texts = "".join(ElementTree.parse(folder / "map.svg").getroot().itertext())

    assert f"{SHOWN} 0" in texts
    assert ElementTree.parse(folder / "timeline.svg").getroot().tag.endswith("svg")


def test_the_command_line_shows_a_hostile_path_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    path = "no\x1b[31m/such.json"
    assert main(["show", path]) == 1
    error = capsys.readouterr().err

    assert r"no\x1b[31m/such.json" in error
    assert error.rstrip("\n").isprintable()


class Named(nn.Module):
    """Uses a block of this name, and with `beside` a parameter of its own between blocks."""

    def __init__(self, name: str, beside: bool) -> None:
        super().__init__()
        self.name, self.beside = name, beside
        self.blocks = nn.ModuleDict({name: nn.Linear(4, 4)})
        self.last = nn.Linear(4, 4)
        self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[self.name](x)
        return self.last(x * self.get_parameter(self.name) if self.beside else x)


NAMES = ['a"b', "a'b", "a\nb", "a\\b", "a b", '"""', "{x}", "a\x1b[31mb", '"), exit("']


@pytest.mark.parametrize("name", NAMES)
def test_a_block_may_have_any_name(name: str) -> None:
    # Capture compares the chain with the model, outputs and gradients.
    assert len(penstock.capture(Named(name, beside=False), (torch.ones(2, 4),)).layers) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_would_end_its_text_is_refused(name: str) -> None:
    """torch.fx writes names between the blocks into code as they are."""
    model, sample = Named(name, beside=True), (torch.ones(2, 4),)
    if set(name) & set('"\\\n'):
        with pytest.raises(penstock.CaptureError, match="expected a name without double quotes, backslashes") as caught:
            penstock.capture(model, sample)
        assert repr(name) in str(caught.value)
    else:
        assert len(penstock.capture(model, sample).layers) == 2
