"""Checkpoints of stages that a hook has split hold whole tensors: they load under any plan, as any plan's load here."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file

from support.jobs import composition_jobs as jobs
from support.jobs.composition_jobs import Run, Saved
from support.processes import Pool

ROUNDING = 1e-9
"""AdamW takes the root of what tensor parallelism rounds otherwise."""


Saves: TypeAlias = Callable[[Run], tuple[Path, list[Saved]]]


def one_process(run: Run) -> Run:
    """`run` with all its stages in this process."""
    return replace(run, hook="none", replicas=1, tp=1)


CHECKPOINTED = (
    Run("split_columns_and_rows", "2bw", tp=2, optimizer="adamw"),
    Run("shard_blocks", replicas=2, optimizer="adamw"),
    Run("split_and_shard", stages=1, tp=2, replicas=2, optimizer="adamw", hooked=True),
)


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Saves:
    """Trains a run once in four processes, which save: where, and what each of them has found."""

    @cache
    def save(run: Run) -> tuple[Path, list[Saved]]:
        directory = tmp_path_factory.mktemp("saved")
        return directory, pool.run(4, jobs.save, run, str(directory))

    return save


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("run", CHECKPOINTED, ids=str)
def test_a_checkpoint_of_shards_loads_under_any_plan(pool: Pool, saved: Saves, run: Run) -> None:
    directory, found = saved(run)
    expected = [each.losses for each in found]
    again = pool.run(4, jobs.load, run, str(directory))
    alone = jobs.load(one_process(run), str(directory))

    assert again == expected
    assert alone == pytest.approx(expected[0], abs=ROUNDING, rel=0)


def test_a_checkpoint_of_one_process_loads_into_shards(pool: Pool, tmp_path: Path) -> None:
    run = CHECKPOINTED[-1]
    expected = jobs.save(one_process(run), str(tmp_path / "saved")).losses

    assert pool.run(4, jobs.load, run, str(tmp_path / "saved"))[0] == pytest.approx(expected, abs=ROUNDING, rel=0)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("run", CHECKPOINTED, ids=str)
def test_weights_of_shards_are_exported_whole_and_once(saved: Saves, run: Run) -> None:
    directory, found = saved(run)
    written = [item for path in (directory / "weights").glob("*.safetensors") for item in load_file(path).items()]

    assert len(written) == len(dict(written)) == len(run.build().state_dict())
    for each in found:
        assert each.whole.keys() == run.build().state_dict().keys()
        assert all(torch.equal(tensor, each.whole[name]) for name, tensor in (*each.own.items(), *written))
