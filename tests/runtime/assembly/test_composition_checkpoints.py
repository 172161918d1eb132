"""Checkpoints of stages that a hook has split hold whole tensors: they load under any plan, as any plan's load here."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from support.jobs import composition_jobs as jobs
from support.jobs.composition_jobs import Run
from support.processes import Pool

ROUNDING = 1e-9
"""AdamW takes the root of what tensor parallelism rounds otherwise."""


def one_process(run: Run) -> Run:
    """`run` with all its stages in this process."""
    return replace(run, hook="none", replicas=1, tp=1)


CHECKPOINTED = (
    Run("split_columns_and_rows", "2bw", tp=2, optimizer="adamw"),
    Run("shard_blocks", replicas=2, optimizer="adamw"),
    Run("split_and_shard", stages=1, tp=2, replicas=2, optimizer="adamw", hooked=True),
)


@pytest.mark.slow
@pytest.mark.parametrize("run", CHECKPOINTED, ids=str)
def test_a_checkpoint_of_shards_loads_under_any_plan(pool: Pool, tmp_path: Path, run: Run) -> None:
    expected = pool.run(4, jobs.save, run, str(tmp_path / "saved"))
    again = pool.run(4, jobs.load, run, str(tmp_path / "saved"))
    alone = jobs.load(one_process(run), str(tmp_path / "saved"))

    assert again == expected
    assert alone == pytest.approx(expected[0], abs=ROUNDING, rel=0)


def test_a_checkpoint_of_one_process_loads_into_shards(pool: Pool, tmp_path: Path) -> None:
    run = CHECKPOINTED[-1]
    expected = jobs.save(one_process(run), str(tmp_path / "saved"))

    assert pool.run(4, jobs.load, run, str(tmp_path / "saved"))[0] == pytest.approx(expected, abs=ROUNDING, rel=0)


@pytest.mark.slow
@pytest.mark.parametrize("run", CHECKPOINTED[::2], ids=str)
def test_weights_of_shards_are_exported_whole_and_once(pool: Pool, tmp_path: Path, run: Run) -> None:
    results = pool.run(4, jobs.export, run, str(tmp_path))
    written = [item for path in tmp_path.glob("*.safetensors") for item in load_file(path).items()]

    assert len(written) == len(dict(written)) == len(jobs.build_model().state_dict())
    for own, whole in results:
        assert whole.keys() == jobs.build_model().state_dict().keys()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in (*own.items(), *written))
