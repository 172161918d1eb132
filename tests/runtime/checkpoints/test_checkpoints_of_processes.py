"""Checkpoints of several processes: one writer for each tensor, the same error on all, and states of each process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import penstock
from penstock.runtime.checkpoints.checkpoint_writer import assign_owners
from support.jobs import checkpoint_jobs as jobs
from support.jobs.checkpoint_jobs import REPLICATED
from support.processes import Pool


def test_replicas_share_what_is_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, jobs.save_replicated, tmp_path / "run")
    path = tmp_path / "run" / "step-000001"
    parts = [[*load_file(file)] for file in sorted(path.glob("model-*"))]
    sizes = [sum(tensor.numel() for tensor in load_file(file).values()) for file in sorted(path.glob("model-*"))]

    names = [name for part in parts for name in part]
    assert len(parts) == 3
    assert sorted(names) == sorted(jobs.SUBJECT.build().state_dict())
    # As even as tensors of at most 36 numbers allow.
    assert abs(sizes[0] - sizes[1]) <= 36
    assert REPLICATED.to_yaml().splitlines()[1] in (path / "manifest.json").read_text()


def test_owners_have_about_as_much() -> None:
    own = [{f"{key}": ((), "float32") for key in range(start, start + 6)} for start in (0, 2, 4)]
    owners = assign_owners(own)

    assert [list(owners.values()).count(rank) for rank in range(3)] == [4, 3, 3]
    assert all(key in own[rank] for key, rank in owners.items())


def test_ranks_that_differ_are_refused_before_anything_is_written(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, jobs.refuse_on_all, tmp_path)

    assert [text.split(":")[0].split(" ")[0] for text in first] == ["rank"] * 5
    assert len(second) == 5
    assert "expected the same on all ranks" in first[0]
    assert "of-0" in first[0]
    assert "of-1" in first[0]
    assert (
        first[3]
        == second[3]
        == "rank 1: directory='': expected the path of a directory, a text or a pathlib.Path. Pass one"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_of_one_rank_is_the_same_error_on_all(pool: Pool, tmp_path: Path) -> None:
    answers = pool.run(3, jobs.fail_on_one_rank, tmp_path / "run")

    (message,) = {message for message, _, _ in answers}
    assert message.startswith("rank 2: ")
    assert "-00002.safetensors: expected to write or read it" in message
    assert [answer[1:] for answer in answers] == [(3, True)] * 3
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-000001", "step-000003"]


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit code -9") as caught:
        pool.run(2, jobs.die_in_a_save, tmp_path)

    assert "TransportError" in str(caught.value)
    assert penstock.latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    pool.run(2, jobs.fail_on_one_rank, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000004"]


def test_all_ranks_fall_back_together(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, jobs.fall_back_together, tmp_path / "run") == [1, 1]


def test_each_process_gets_its_own_states_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, jobs.save_own, tmp_path / "run")
    answers = pool.run(2, jobs.load_own, tmp_path / "run", ("mine", "ours"))
    for rank, (values, drawn) in enumerate(answers):
        torch.manual_seed(rank)
        assert values[0].item() == rank
        assert values[1][1] == "x"
        assert drawn == torch.rand(1).item()
    # Another number of processes cannot know which state is its own.
    alone = jobs.load_own(tmp_path / "run", ("mine", "ours"))
    assert isinstance(alone, str)
    assert "different states on its 2 processes: expected as many processes now, found 1" in alone
    # Equal tensors are stored once.
    stored = [key for file in (tmp_path / "run").glob("*/state-*") for key in load_file(file) if "objects" in key]
    assert len(stored) == 3
