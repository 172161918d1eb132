"""What the docs show runs."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import penstock
from support.paths import ROOT

DOCS = ROOT / "docs"
RUN = ("gpus.md", "training.md")


def read_blocks(file: Path) -> list[str]:
    """The Python in a text."""
    return re.findall(r"^```python\n(.*?)^```$", file.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_every_option_is_shown() -> None:
    files = (DOCS.parent / "README.md", *DOCS.glob("*.md"))
    shown = "".join(block for file in files for block in read_blocks(file))
    options = set(inspect.signature(penstock.Pipeline.__init__).parameters) - {"self", "model"}

    assert {name for name in options if not re.search(rf"\b{name}=", shown)} == set()


@pytest.mark.parametrize("name", RUN)
def test_python_in_the_docs_runs(name: str) -> None:
    torch.manual_seed(0)
    given = {
        "torch": torch,
        "penstock": penstock,
        "model": torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4))),
        "loss_fn": torch.nn.functional.cross_entropy,
        "x": torch.randn(8, 6),
        "y": torch.randint(6, (8,)),
    }
    blocks = read_blocks(DOCS / name)

    assert blocks
    for block in blocks:
        exec(block, dict(given))
