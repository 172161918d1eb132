"""A LightningModule that trains through a pipeline: its numbers are those of a plain one, and it saves and resumes."""

from pathlib import Path

import pytest
import torch

from support.jobs.lightning_jobs import fit_and_resume, fit_plainly
from support.processes import Pool

pytest.importorskip("lightning")
# Lightning advises about loggers and workers, and uses names of old of PyTorch.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_numbers_of_plain_lightning(processes: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    metrics, weights, steps = fit_plainly(tmp_path / "plain")
    if processes == 1:
        found = [fit_and_resume(tmp_path / "run")]
    else:
        pool: Pool = request.getfixturevalue("pool")
        found = pool.run(processes, fit_and_resume, tmp_path / "run")

    for whole, resumed, files in found:
        assert files == ["step=12.ckpt", "step=12.ckpt.pipeline"]
        for own, trained, count in (whole, resumed):
            assert count == steps == 12
            # Lightning logs in float32.
            assert own["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
            assert own["validation_loss"] == pytest.approx(metrics["validation_loss"], rel=1e-6)
            assert own["test_loss"] == own["validation_loss"]
            assert trained.keys() == weights.keys()
            assert all(torch.equal(trained[name], tensor) for name, tensor in weights.items())

    saved = torch.load(tmp_path / "run" / "whole" / "step=12.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights.items())
