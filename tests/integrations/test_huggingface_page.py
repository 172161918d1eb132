"""The code in docs/huggingface.md runs."""

import importlib.util
from pathlib import Path

import pytest
import torch

from support.jobs.page_jobs import BLOCKS, fit_by_lightning, names
from support.processes import Pool

pytestmark = pytest.mark.slow


def test_python_in_the_page_runs(tmp_path: Path) -> None:
    given = names(tmp_path / "run")
    for block in BLOCKS[:-1]:
        exec(block, given)

    assert len(BLOCKS) == 5
    assert (tmp_path / "run" / "model.safetensors").exists()


# Lightning advises about loggers and workers, and uses names of old of PyTorch.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="Lightning is not installed")
@pytest.mark.parametrize("processes", [1, 2])
def test_lightning_trains_as_a_loop_does(tmp_path: Path, processes: int, request: pytest.FixtureRequest) -> None:
    if processes == 1:
        results = [fit_by_lightning(tmp_path / "run")]
    else:
        pool: Pool = request.getfixturevalue("pool")
        results = pool.run(processes, fit_by_lightning, tmp_path / "run")

    for metrics, trained, loss, expected in results:
        assert metrics["validation_loss"] == pytest.approx(loss, rel=1e-6)  # Lightning averages in float32
        assert trained.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in trained.items())
    assert (tmp_path / "run").exists()
