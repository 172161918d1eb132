"""Checkpoints of several processes: one writer for each tensor, the same error on all, and states of each process."""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import penstock
from penstock.runtime.checkpoints.checkpoint_writer import assign_owners
from support.checkpointed import SUBJECT, make
from support.processes import Pool

REPLICATED = penstock.Plan((penstock.Stage(0, 5, (0, 1)), penstock.Stage(5, 8, (2,))), "gpipe", 4)


def _make(**options: Any) -> penstock.Pipeline:
    return make(**{"stages": None, **options})


def _total(pipe: penstock.Pipeline) -> float:
    return float(sum(parameter.sum() for parameter in pipe.parameters()))


def save_replicated(directory: Path) -> None:
    """A checkpoint of two replicas of one stage, and another stage."""
    with _make(plan=REPLICATED) as pipe:
        pipe.step(*SUBJECT.batches[0])
        pipe.save(directory)


def refuse_on_all(directory: Path) -> list[str]:
    """The errors of saves and loads in which the ranks differ; the pipeline is used after each."""
    rank, errors = dist.get_rank(), []
    with _make() as pipe:
        attempts = (
            lambda: pipe.save(directory / f"of-{rank}"),
            lambda: pipe.save(directory / "run", step=rank),
            lambda: pipe.save(directory / "run", keep=1 + rank),
            lambda: pipe.save("" if rank else directory / "run"),
            lambda: pipe.load(directory / f"of-{rank}"),
        )
        for attempt in attempts:
            try:
                attempt()
            except penstock.CheckpointError as error:
                errors.append(str(error))
            pipe.step(*SUBJECT.batches[0])
    return errors


def fail_on_one_rank(directory: Path) -> tuple[str, int, bool]:
    """The error of a save in which the disk of the last rank is full, and whether training and saving go on."""
    with _make(microbatches=2, resume=directory) as pipe:
        pipe.step(*SUBJECT.batches[0])
        pipe.save(directory)
        pipe.step(*SUBJECT.batches[1])
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == dist.get_world_size() - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        found = ""
        try:
            pipe.save(directory)
        except penstock.CheckpointError as error:
            found = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        pipe.step(*SUBJECT.batches[2])
        pipe.save(directory)
        saved = _total(pipe)
        pipe.step(*SUBJECT.batches[3])
        pipe.load(directory)
        return found, pipe.steps, _total(pipe) == saved


def die_in_a_save(directory: Path) -> None:
    """The last rank is killed as it writes its part."""
    with _make(microbatches=2) as pipe:
        pipe.step(*SUBJECT.batches[0])
        pipe.save(directory)
        if dist.get_rank() == dist.get_world_size() - 1:

            def die(event: str, arguments: Any) -> None:
                if event == "open" and "safetensors" in str(arguments[0]):
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(die)
        pipe.save(directory, 2)


def fall_back_together(directory: Path) -> int:
    """The step that is loaded, where one file of the newest checkpoint is damaged, which one rank reads."""
    with _make(microbatches=2) as pipe:
        for batch in SUBJECT.batches[:2]:
            pipe.step(*batch)
            path = pipe.save(directory)
        if dist.get_rank() == 0:
            last = max(path.glob("state-*"))
            content = bytearray(last.read_bytes())
            content[-1] ^= 1
            last.write_bytes(content)
        dist.barrier()
        pipe.load(directory)
        return pipe.steps


class _Own:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def save_own(directory: Path) -> None:
    """Objects that differ between ranks and objects that do not, without a seed."""
    rank = dist.get_rank()
    with _make(seed=None) as pipe:
        torch.manual_seed(rank)
        pipe.track(mine=_Own(torch.tensor([rank])), ours=_Own((torch.arange(3), "x")))
        pipe.save(directory)


def load_own(directory: Path, names: tuple[str, ...]) -> tuple[list[Any], float] | str:
    """The objects `names` after a load, and a number that PyTorch then draws; or the error."""
    objects = {name: _Own(None) for name in names}
    alone = {} if dist.is_initialized() else {"stages": 1}
    with _make(seed=None, **alone) as pipe:
        pipe.track(**objects)
        try:
            pipe.load(directory)
        except penstock.CheckpointError as error:
            return str(error)
        return [own.value for own in objects.values()], torch.rand(1).item()


def test_replicas_share_what_is_written(pool: Pool, tmp_path: Path) -> None:
    pool.run(3, save_replicated, tmp_path / "run")
    path = tmp_path / "run" / "step-000001"
    parts = [[*load_file(file)] for file in sorted(path.glob("model-*"))]
    sizes = [sum(tensor.numel() for tensor in load_file(file).values()) for file in sorted(path.glob("model-*"))]

    names = [name for part in parts for name in part]
    assert len(parts) == 3
    assert sorted(names) == sorted(SUBJECT.build().state_dict())
    # As even as tensors of at most 36 numbers allow.
    assert abs(sizes[0] - sizes[1]) <= 36
    assert REPLICATED.to_yaml().splitlines()[1] in (path / "manifest.json").read_text()


def test_owners_have_about_as_much() -> None:
    own = [{f"{key}": ((), "float32") for key in range(start, start + 6)} for start in (0, 2, 4)]
    owners = assign_owners(own)

    assert [list(owners.values()).count(rank) for rank in range(3)] == [4, 3, 3]
    assert all(key in own[rank] for key, rank in owners.items())


def test_ranks_that_differ_are_refused_before_anything_is_written(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, refuse_on_all, tmp_path)

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
    answers = pool.run(3, fail_on_one_rank, tmp_path / "run")

    (message,) = {message for message, _, _ in answers}
    assert message.startswith("rank 2: ")
    assert "-00002.safetensors: expected to write or read it" in message
    assert [answer[1:] for answer in answers] == [(3, True)] * 3
    left = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert left == [".penstock-lock", "step-000001", "step-000003"]


def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"exit code -9") as caught:
        pool.run(2, die_in_a_save, tmp_path)

    assert "TransportError" in str(caught.value)
    assert penstock.latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    pool.run(2, fail_on_one_rank, tmp_path)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".penstock-lock", "step-000001", "step-000002", "step-000004"]


def test_all_ranks_fall_back_together(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, fall_back_together, tmp_path / "run") == [1, 1]


def test_each_process_gets_its_own_states_back(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, save_own, tmp_path / "run")
    answers = pool.run(2, load_own, tmp_path / "run", ("mine", "ours"))
    for rank, (values, drawn) in enumerate(answers):
        torch.manual_seed(rank)
        assert values[0].item() == rank
        assert values[1][1] == "x"
        assert drawn == torch.rand(1).item()
    # Another number of processes cannot know which state is its own.
    alone = load_own(tmp_path / "run", ("mine", "ours"))
    assert isinstance(alone, str)
    assert "different states on its 2 processes: expected as many processes now, found 1" in alone
    # Equal tensors are stored once.
    stored = [key for file in (tmp_path / "run").glob("*/state-*") for key in load_file(file) if "objects" in key]
    assert len(stored) == 3
