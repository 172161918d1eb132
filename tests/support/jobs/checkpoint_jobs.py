"""Jobs that save and load checkpoints in several processes, some of which fail."""

import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import penstock
from support import models

SUBJECT = models.LAYERED
REPLICATED = penstock.Plan((penstock.Stage(0, 5, (0, 1)), penstock.Stage(5, 8, (2,))), "gpipe", 4)


def _make(**options: Any) -> penstock.Pipeline:
    arguments = {"sample": SUBJECT.sample, "loss_fn": F.cross_entropy, "optimizer": models.adamw}
    return penstock.Pipeline(SUBJECT.build(), **{**arguments, **options})


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
