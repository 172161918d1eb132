"""The optimizer's state that replicas share: each has a part of it, and all have the numbers of one that is whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PenstockError
from penstock.runtime.parameters.weight_shares import assign_owners
from support import models
from support.jobs.peak_jobs import Training, measure_peaks
from support.optimizers import GlobalNorm, GroupCounter, OwnCounter
from support.processes import Pool
from support.training import train

PLAN = penstock.Plan((penstock.Stage(0, 5, (0, 1)), penstock.Stage(5, 8, (2,))), "1f1b-flush", 4)
BATCHES = models.LAYERED.batches


def start(plan: penstock.Plan = PLAN, optimizer: Any = models.adamw, **options: Any) -> penstock.Pipeline:
    subject = models.LAYERED
    return penstock.Pipeline(
        subject.build(), subject.sample, subject.loss_fn, optimizer, plan=plan, check="off", **options
    )


def bytes_of(sizes: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in sizes)


def find_state(plan: penstock.Plan) -> tuple[set[str], set[str], set[str], int, int]:
    """After a step: the names of what this process trains, steps and has the averages of, and the bytes of the
    optimizer's state and of the weights that it trains.
    """
    pipe = start(plan, shard_optimizer=True)
    pipe.step(*BATCHES[0])
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    state = {p: s for optimizer in pipe.optimizers for p, s in optimizer.state.items()}
    kept = bytes_of(tensor for each in state.values() for tensor in each.values() if tensor.ndim)
    trained = bytes_of(pipe.parameters())
    stepped, entries = {names[id(p)] for p in state}, set(pipe.state_dict()["optimizer"]["state"])
    pipe.close()
    return set(names.values()), stepped, entries, kept, trained


def test_the_state_exists_once_among_replicas(pool: Pool) -> None:
    three = penstock.Plan((penstock.Stage(0, 8, (0, 1, 2)),), "2bw", 3)
    for plan, replicas in ((PLAN, (0, 1)), (three, (0, 1, 2))):
        found = [each for rank, each in enumerate(pool.run(3, find_state, plan)) if rank in replicas]
        for held, stepped, entries, kept, trained in found:
            assert stepped == entries < held
            # AdamW keeps two numbers for a weight. A parameter is not cut, and the largest is a tenth of all.
            assert kept == pytest.approx(2 * trained / len(replicas), rel=0.15)
        assert sum(len(stepped) for _, stepped, *_ in found) == len(found[0][0])
        assert set().union(*(stepped for _, stepped, *_ in found)) == found[0][0]


@pytest.mark.parametrize(("replicas", "sizes"), [(2, [4, 4, 4, 4]), (3, [7, 5, 5, 4, 3, 3, 3]), (4, [1]), (8, [9, 9])])
def test_parts_are_about_equal(replicas: int, sizes: list[int]) -> None:
    parameters = {str(number): nn.Parameter(torch.empty(size)) for number, size in enumerate(sizes)}
    loads = [0] * replicas
    owners = assign_owners(parameters, loads)
    assert owners.keys() == parameters.keys() and sum(loads) == 4 * sum(sizes)
    # No replica could give one away to the one with the least, and be above it still.
    for name, owner in owners.items():
        assert loads[owner] - min(loads) <= parameters[name].nbytes

    # Those of a stage before count.
    again = assign_owners({"more": nn.Parameter(torch.empty(1))}, [8, 4, 8, 8])
    assert again == {"more": 1}


def save_and_go_on(directory: str, plans: list[tuple[penstock.Plan, bool]], background: bool) -> list[Any]:
    """The losses after each of several loads, by other plans, of what this plan has saved."""
    (plan, shares), *others = plans
    pipe = start(plan, shard_optimizer=shares, update_hooks=penstock.WeightAverage(0.5))
    for batch in BATCHES[:2]:
        pipe.step(*batch)
    if background:
        save = pipe.save(directory, wait=False)
        pipe.step(*BATCHES[3])
        pipe.drain()
        save.wait()
    else:
        pipe.save(directory)
    averages = {name: average.tolist() for name, average in pipe.averages().items()}
    pipe.close()
    found = []
    for other, moved in others:
        pipe = start(other, shard_optimizer=moved, update_hooks=penstock.WeightAverage(0.5))
        # What it has seen so far is forgotten.
        pipe.step(*BATCHES[3])
        pipe.load(directory)
        found.append(train(pipe, BATCHES[2:]).losses)
        pipe.close()
    return [found, averages]


@pytest.mark.parametrize("background", [False, True], ids=["waited for", "beside the training"])
def test_checkpoints_are_whole_and_fit_any_number_of_replicas(pool: Pool, tmp_path: Path, background: bool) -> None:
    """Files and numbers are those of a training that does not share."""
    wide = penstock.Plan((penstock.Stage(0, 8, (0, 1, 2)),), "1f1b-flush", 4)
    straight = penstock.Plan.uniform(8, 3, "1f1b-flush", 4)
    others = [(PLAN, True), (PLAN, False), (wide, True), (straight, True)]
    outcomes, files = [], []
    for shares in (True, False):
        place = tmp_path / str(shares)
        found = pool.run(3, save_and_go_on, str(place), [(PLAN, shares), *others], background)
        assert found[0] == found[1]
        outcomes.append(found)
        files.append({name for path in place.rglob("*.safetensors") for name in keys_of(path)})
    assert outcomes[0] == outcomes[1]
    assert files[0] == files[1] != set()
    losses = outcomes[0][0][0]
    assert losses[0] == losses[1]


def keys_of(path: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(path, "pt") as opened:
        return list(opened.keys())


REFUSED = {"GlobalNorm": GlobalNorm, "SparseAdam": torch.optim.SparseAdam}


@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_needs_all_parameters_is_refused(name: str) -> None:
    """In one process too, where it would do no harm."""
    with pytest.raises(PenstockError, match=f"shard_optimizer=: expected an optimizer that steps each .* found {name}"):
        start(optimizer=REFUSED[name], shard_optimizer=True)
    with pytest.raises(PenstockError, match="found LBFGS"):
        start(optimizer=torch.optim.LBFGS, shard_optimizer=True)


def train_shared(optimizer: Any, shares: bool) -> Any:
    pipe = start(optimizer=optimizer, shard_optimizer=shares)
    return train(pipe, BATCHES).losses


@pytest.mark.parametrize("optimizer", [OwnCounter, GroupCounter, torch.optim.Muon], ids=lambda kind: kind.__name__)
def test_counters_and_whole_matrices_are_right(pool: Pool, optimizer: Any) -> None:
    make = several if optimizer is torch.optim.Muon else optimizer
    assert pool.run(3, train_shared, make, True) == pool.run(3, train_shared, make, False)


def several(parameters: penstock.NamedParameters) -> list[torch.optim.Optimizer]:
    matrices, rest = parameters.where(lambda _, p: p.ndim == 2), parameters.where(lambda _, p: p.ndim != 2)
    made: list[torch.optim.Optimizer] = [torch.optim.Muon(matrices, lr=0.02)] if matrices else []
    return [*made, torch.optim.Adam(rest)] if rest else made


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw", "pipedream"])
def test_peaks_fall_as_predicted(pool: Pool, schedule: str) -> None:
    """A replica of three has a third of the state."""
    trainings = [Training(schedule, ranks=3, shares=shares) for shares in (False, True)]
    for whole, shared in pool.run(3, measure_peaks, trainings):
        fall = whole.measured["allocated"] - shared.measured["allocated"]
        # Buckets that are on their way, which no prediction has, become smaller as well.
        assert fall == pytest.approx(whole.predicted - shared.predicted, abs=0.05 * whole.predicted)


def test_plans_count_the_share_of_a_replica() -> None:
    """Layers that are too large for a device with all their state are shared by replicas."""
    layers = [penstock.LayerProfile(f"{i}", 1.0, 2.0, 1.0, 2.0, 100.0) for i in range(2)]
    profile, cluster = penstock.Profile(tuple(layers), 1), penstock.Cluster.uniform(4, 1e9)
    options: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 8, "planner": "pipedream"}
    kept, shared = (penstock.plan(profile, cluster, **options, shard_optimizer=on) for on in (False, True))
    assert kept.predicted is not None and shared.predicted is not None
    assert kept.stages == shared.stages and set(kept.replicas) == {4}
    # Two copies of 200 bytes, of which each replica has a quarter.
    assert [a - b for a, b in zip(kept.predicted.peak_bytes, shared.predicted.peak_bytes, strict=True)] == [300.0] * 4
    small = replace(cluster, memory_bytes=650.0)
    assert set(penstock.plan(profile, small, **options, shard_optimizer=True).replicas) == {4}
    assert set(penstock.plan(profile, small, **options).replicas) != {4}


def test_both_halves_of_the_all_reduce_take_their_time() -> None:
    """100 bytes on links of 100 bytes per second: two replicas send half of that each way for the sum, and again for
    the weights. An update of two seconds is one for each.
    """
    layer = penstock.LayerProfile("0", 1.0, 2.0, 0.0, 0.0, 100.0, update_seconds=2.0)
    profile, cluster = penstock.Profile((layer,), 1), penstock.Cluster.uniform(2, 100.0)
    plan = penstock.Plan((penstock.Stage(0, 1, (0, 1)),), "gpipe", 2)
    for shares, update in ((False, 2.0), (True, 1.5)):
        spans = penstock.simulate(plan, profile, cluster, overlap_reduce=False, shard_optimizer=shares).spans
        found = {span.action: span.stop_seconds - span.start_seconds for span in spans if span.rank == 0}
        assert found == {"0F0@0": 1.0, "0B0@0": 2.0, "0A1": 0.5 if shares else 1.0, "0U1<0": update}
