"""What the docs show runs."""

import re
from pathlib import Path

import pytest
import torch

import penstock

DOCS = Path(__file__).parents[1] / "docs"
RUN = ("training.md",)


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
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(), flags=re.MULTILINE | re.DOTALL)

    assert blocks
    for block in blocks:
        exec(block, dict(given))
