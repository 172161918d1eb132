"""Ranks that do different things, or are given different data, end at once, and each says what differs."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock
from penstock.runtime.assembly.pipeline_options import OPTIONS
from support import models
from support.processes import Pool

Scenario = Callable[[penstock.Pipeline], None]


SCHEDULES = ("1f1b-flush", "2bw", "pipedream")


SUBJECT = models.SUBJECTS["perceptron"]
GENERATOR = torch.Generator().manual_seed(5)
INPUTS = torch.randn(96, *SUBJECT.sample[0].shape[1:], dtype=torch.float64, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (96,), generator=GENERATOR)


def make(**options: Any) -> penstock.Pipeline:
    """A pipeline over all processes."""
    arguments = {"sample": SUBJECT.sample, "loss_fn": F.cross_entropy, "optimizer": models.momentum, "microbatches": 3}
    return penstock.Pipeline(SUBJECT.build(), **{**arguments, "timeout_seconds": 60.0, **options})


def batches(size: int = 12) -> list[tuple[Tensor, Tensor]]:
    """The same ones on every rank."""
    return list(zip(INPUTS.split(size), TARGETS.split(size), strict=True))


def steps(pipe: penstock.Pipeline, given: Iterable[Any]) -> None:
    """One step for each of `given`."""
    for x, y in given:
        pipe.step(x, y)


SCENARIOS: dict[str, Scenario] = {}
EXPECTED: dict[str, str] = {}


def ends_with(error: str) -> Callable[[Scenario], Scenario]:
    """A scenario that ends with this error on every rank; with none if it is empty."""

    def add(job: Scenario) -> Scenario:
        SCENARIOS[job.__name__], EXPECTED[job.__name__] = job, error
        return job

    return add


@ends_with("with values of digest")
def skip_a_record(pipe: penstock.Pipeline) -> None:
    """Rank 1 leaves a batch out, and steps once less."""
    steps(pipe, [batch for number, batch in enumerate(batches()) if number != 4 or pipe.rank != 1])
    pipe.drain()


@ends_with("with values of digest")
def skip_the_first(pipe: penstock.Pipeline) -> None:
    """Rank 1 begins with the second batch."""
    steps(pipe, batches()[pipe.rank == 1 :])


@ends_with("calls drain")
def step_once_more(pipe: penstock.Pipeline) -> None:
    """Rank 0 makes a step that the others do not make."""
    steps(pipe, batches()[: 5 if pipe.rank == 0 else 4])
    pipe.drain()


@ends_with("calls drain")
def step_once_less(pipe: penstock.Pipeline) -> None:
    """Rank 0 drains a step early."""
    steps(pipe, batches()[: 4 if pipe.rank == 0 else 5])
    pipe.drain()


@ends_with("penstock.loader(dataset, ...). A DistributedSampler")
def take_parts(pipe: penstock.Pipeline) -> None:
    """Every rank takes a part of the data, as it would for data parallelism."""
    dataset = TensorDataset(INPUTS, TARGETS)
    steps(pipe, DataLoader(dataset, 12, sampler=DistributedSampler(dataset)))


@ends_with("shuffle without a common seed")
def shuffle_apart(pipe: penstock.Pipeline) -> None:
    """Every rank shuffles in its own order."""
    generator = torch.Generator().manual_seed(pipe.rank)
    steps(pipe, DataLoader(TensorDataset(INPUTS, TARGETS), 12, shuffle=True, generator=generator))


@ends_with("has target with values of digest")
def swap_targets(pipe: penstock.Pipeline) -> None:
    """The targets of rank 1 are those of other samples."""
    steps(pipe, ((x, y.flip(0) if pipe.rank == 1 else y) for x, y in batches()))


@ends_with("8 samples")
def take_other_sizes(pipe: penstock.Pipeline) -> None:
    """Rank 1 takes smaller batches."""
    steps(pipe, batches(8 if pipe.rank == 1 else 12))


@ends_with("8 samples")
def take_other_sizes_later(pipe: penstock.Pipeline) -> None:
    """Rank 0 takes a smaller batch in the middle."""
    steps(pipe, ((x[:8], y[:8]) if n == 4 and pipe.rank == 0 else (x, y) for n, (x, y) in enumerate(batches())))


@ends_with("with values of digest")
def split_parts_of_the_batch(pipe: penstock.Pipeline) -> None:
    """The first rank passes inputs, the last one targets, with other inputs: they have nothing to compare but these."""
    for x, y in batches():
        if pipe.rank == 0:
            pipe.step(x)
        elif pipe.rank == dist.get_world_size() - 1:
            pipe.step(x + 1, y)
        else:
            pipe.step(torch.empty_like(x, device="meta"))


@ends_with("calls evaluate")
def evaluate_alone(pipe: penstock.Pipeline) -> None:
    """Rank 1 evaluates while the others step."""
    steps(pipe, batches()[:4])
    if pipe.rank == 1:
        pipe.evaluate(*batches()[0])
    steps(pipe, batches()[4:])
    pipe.drain()


@ends_with("calls predict")
def predict_instead(pipe: penstock.Pipeline) -> None:
    """Rank 0 predicts where the others evaluate."""
    x, y = batches()[0]
    pipe.step(x, y)
    if pipe.rank == 0:
        pipe.predict(x)
    else:
        pipe.evaluate(x, y)


@ends_with("calls state_dict")
def state_of_one(pipe: penstock.Pipeline) -> None:
    """The last rank alone takes a state dict."""
    steps(pipe, batches()[:4])
    if pipe.rank == dist.get_world_size() - 1:
        pipe.state_dict()
    steps(pipe, batches()[4:])
    pipe.drain()


@ends_with("microbatches of training, and rank")
def load_on_one(pipe: penstock.Pipeline) -> None:
    """Rank 0 goes back to an earlier state."""
    state = pipe.state_dict()
    steps(pipe, batches()[:2])
    pipe.drain()
    if pipe.rank == 0:
        state["pipeline"]["microbatches"] = 0
        pipe._engine.restart(0)
    steps(pipe, batches()[2:4])


@ends_with("cannot be cut into 3 microbatches")
def refuse_on_one(pipe: penstock.Pipeline) -> None:
    """Rank 1 has a batch that cannot be cut, and goes on with the next one."""
    for number, (x, y) in enumerate(batches()):
        size = 1 if number == 3 and pipe.rank == 1 else len(x)
        pipe.step(x[:size], y[:size])


@ends_with("")
def refuse_on_all(pipe: penstock.Pipeline) -> None:
    """All ranks have a batch that cannot be cut, and go on with the next one."""
    for number, (x, y) in enumerate(batches()):
        size = 1 if number == 3 else len(x)
        try:
            pipe.step(x[:size], y[:size])
        except penstock.PenstockError as error:
            assert "cannot be cut" in str(error) and number == 3
    pipe.drain()


def drift(cases: list[tuple[str, str]]) -> list[str]:
    """The error that each of `cases`, a scenario under a schedule, ends with on this rank."""
    errors = []
    for scenario, schedule in cases:
        pipe = make(schedule=schedule)
        try:
            SCENARIOS[scenario](pipe)
            errors.append("")
        except penstock.PenstockError as error:
            errors.append(str(error))
        with suppress(Exception):
            pipe.close()
        dist.barrier()
    return errors


APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip_grad_norm": ({"clip_grad_norm": 1.0}, {}),
    "loss_scale": ({"loss_scale": "dynamic"}, {"loss_scale": 8.0}),
    "autocast": ({"autocast": torch.bfloat16}, {}),
    "version_dtype": ({"autocast": torch.bfloat16, "version_dtype": torch.bfloat16}, {"autocast": torch.bfloat16}),
    "update_hooks": ({"update_hooks": [penstock.WeightAverage(0.9)]}, {"update_hooks": [penstock.WeightAverage(0.99)]}),
    "lr_scheduler": ({"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)}, {}),
    "loss_weight": ({"loss_weight": len}, {}),
    "on_nonfinite": ({"on_nonfinite": "skip"}, {}),
    "seed": ({"seed": 1}, {"seed": None}),
    "recompute": ({"recompute": True}, {}),
    "balance": ({"balance": "layers"}, {}),
    "compile": ({"compile": {"mode": "default"}}, {}),
    "timeout_seconds": ({"timeout_seconds": 50.0}, {}),
    "loss_fn": ({"loss_fn": penstock.model_loss}, {}),
    "wire_dtype": ({"wire_dtype": torch.bfloat16}, {"wire_dtype": penstock.RowInt8()}),
    "init_fn": ({"init_fn": lambda name, tensor: None}, {}),
    "parallelize": ({}, {"parallelize": lambda stage_module, mesh: None}),
    "plan": ({"plan": "auto"}, {"plan": penstock.Plan.uniform(8, 2)}),
    "schedule": ({"schedule": "gpipe"}, {}),
    "microbatches": ({"microbatches": 4}, {}),
    "stages": ({"stages": 2}, {"stages": 4}),
    "vertical_sync": ({"vertical_sync": True}, {}),
    "tensor_parallel": ({"tensor_parallel": 2}, {}),
    "state_on_host": ({"state_on_host": True}, {}),
    "check": ({"check": "off"}, {}),
    "resume": ({"resume": "run"}, {}),
    "save_frozen": ({"save_frozen": False}, {}),
    "shard_optimizer": ({"shard_optimizer": True}, {}),
    "memory_bytes": ({"plan": "auto", "memory_bytes": 1e9}, {"plan": "auto"}),
}
"""By option: the arguments of rank 0, and those of the others."""


def build_apart(folder: Path) -> dict[str, str]:
    """By case, the error with which the building of a pipeline with different arguments ends on this rank. Arguments
    that may differ are tried as well; one names a `folder`.
    """
    alike: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"resume": f"{folder}/run"}, {"resume": folder / "run/"}),
        ({"offload_to": "host"}, {"offload_to": folder}),
        ({"loss_fn": F.cross_entropy}, {"loss_fn": torch.nn.CrossEntropyLoss()}),
        ({"update_hooks": []}, {"update_hooks": ()}),
    ]
    for own in alike:
        make(**own[dist.get_rank()]).close()
    found = {}
    for option, (first, others) in APART.items():
        try:
            make(**(first if dist.get_rank() == 0 else others))
        except penstock.PenstockError as error:
            found[option] = str(error)
    # Two replicas of one stage.
    rate = 0.1 * (1 + dist.get_rank())
    replicas = penstock.Plan((penstock.Stage(0, 8, (0, 1)),), "gpipe", 2)
    for option, optimizer in (
        ("lr", lambda params: torch.optim.SGD(params, lr=rate)),
        ("optimizer", torch.optim.SGD if dist.get_rank() else torch.optim.Adagrad),
    ):
        try:
            make(plan=replicas, microbatches=2, optimizer=optimizer)
        except penstock.PenstockError as error:
            found[option] = str(error)
    return found


ALONE: dict[str, Callable[[penstock.Pipeline], object]] = {
    "drain": lambda pipe: pipe.drain(),
    "evaluate": lambda pipe: pipe.evaluate(*batches()[0]),
    "predict": lambda pipe: pipe.predict(batches()[0][0]),
    "averages": lambda pipe: pipe.averages(),
    "timeline": lambda pipe: pipe.timeline(),
    "stragglers": lambda pipe: pipe.stragglers(),
    "replan": lambda pipe: pipe.replan(),
    "state_dict": lambda pipe: pipe.state_dict(),
    "load_state_dict": lambda pipe: pipe.load_state_dict({}),
    "save": lambda pipe: pipe.save(os.devnull),
    "load": lambda pipe: pipe.load(os.devnull),
    "save_weights": lambda pipe: pipe.save_weights(os.devnull),
    "full_state_dict": lambda pipe: pipe.full_state_dict(),
    "gather_model": lambda pipe: pipe.gather_model(),
}
"""The methods that all ranks must call, but `step` and `close`."""
OWN = {"close", "measure", "named_parameters", "parameters", "stats", "track", "averaged"}
"""Those that a rank may call by itself; `averaged` begins with `averages`, and `close` with a drain."""


def call_alone() -> dict[str, str]:
    """By method, the error after one rank has called it and the others have stepped on."""
    found = {}
    for number, (name, call) in enumerate(ALONE.items()):
        pipe = make(timeout_seconds=600.0, check="off", schedule=SCHEDULES[number % 3])
        steps(pipe, batches()[:1])
        with pytest.raises(penstock.TransportError) as caught:
            if pipe.rank == number % 2:
                call(pipe)
            steps(pipe, batches()[1:])
            pipe.drain()
        found[name] = str(caught.value)
        dist.barrier()
        with suppress(Exception):
            pipe.close()
    return found


def count_alone() -> str:
    """The error after one rank has asked for the numbers of all, which each may ask for its own."""
    pipe = make(timeout_seconds=600.0, check="off")
    steps(pipe, batches()[:1])
    assert pipe.stats().steps == 1 if pipe.rank == 1 else True
    with pytest.raises(penstock.TransportError) as caught:
        if pipe.rank == 0:
            pipe.stats(all_ranks=True)
        steps(pipe, batches()[1:])
    with suppress(Exception):
        pipe.close()
    dist.barrier()
    return str(caught.value)


def part_replicas(schedule: str) -> str:
    """The error after one of two replicas was written to."""
    replicas = penstock.Plan((penstock.Stage(0, 8, (0, 1)),), schedule, 2)
    pipe = make(plan=replicas, microbatches=2)
    try:
        steps(pipe, batches()[:2])
        if pipe.rank == 1:
            with torch.no_grad():
                next(pipe.parameters()).mul_(1.001)
        steps(pipe, batches()[2:])
        pipe.drain()
    except penstock.PenstockError as error:
        return str(error)
    return ""


def test_every_drift_is_named_on_every_rank(pool: Pool) -> None:
    cases = list(zip(SCENARIOS, cycle(SCHEDULES)))
    answers = pool.run(3, drift, cases)
    found = {case: errors for case, *errors in zip(cases, *answers, strict=True)}
    silent = {
        case: errors
        for case, errors in found.items()
        if not all(EXPECTED[case[0]] in error and bool(error) == bool(EXPECTED[case[0]]) for error in errors)
    }

    assert silent == {}


def test_options_that_differ_are_named_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(2, build_apart, tmp_path):
        compared = {name for name, rule in OPTIONS.items() if rule.agrees == "value"}
        assert compared <= APART.keys()
        assert found.keys() == {*APART, "lr", "optimizer"}
        for option, error in found.items():
            assert f" {option}=" in error
            assert "rank 0" in error
            assert "rank 1" in error


def test_a_call_that_one_rank_makes_alone_is_named_in_seconds(pool: Pool) -> None:
    public = {name for name, value in vars(penstock.Pipeline).items() if name[0] != "_" and callable(value)}
    assert public - OWN == {*ALONE, "step"}
    for found in pool.run(2, call_alone):
        silent = {name: error for name, error in found.items() if f"calls {name}" not in error}
        assert silent == {}
        assert all("Make the same calls in the same order on every rank" in error for error in found.values())


def test_a_gather_that_one_rank_makes_alone_is_named_in_seconds(pool: Pool) -> None:
    waiting, stepping = pool.run(2, count_alone)
    assert "rank 0 exchanges values for Pipeline.stats, which all ranks must do, and rank 1 calls step()" in waiting
    # Rank 0 has left with its error.
    assert "rank 1 is in step(), which all ranks must call" in stepping


@pytest.mark.parametrize("schedule", ["gpipe", "2bw"])
def test_replicas_whose_weights_differ_are_named(pool: Pool, schedule: str) -> None:
    for error in pool.run(2, part_replicas, schedule):
        assert "the replicas of stage 0 on ranks [0, 1] have different weights: blocks.0.0.weight" in error
