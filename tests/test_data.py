"""Batches: the same in every process, resumable, with values only where they are read, and ahead of their use."""

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import penstock
from penstock.capturing import capture
from penstock.data import Batches, loader, prefetch, shapes_of
from penstock.errors import PenstockError
from penstock.runtime.batches.batch_splitter import find_inputs
from penstock.runtime.batches.microbatches import split
from support import models
from support.processes import Pool


def make_batches(reads: bool) -> Batches:
    """Batches of 12 samples, and a last one of fewer."""
    batches = models.LAYERED.batches
    dataset = TensorDataset(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))
    return loader(dataset, 12, shuffle=True, seed=1, reads=reads)


def train_where_read(schedule: str) -> tuple[tuple[float, ...], dict[str, Tensor]]:
    """Two epochs in which the first rank has the inputs, the last one the target, and the others shapes."""
    subject, rank, last = models.LAYERED, dist.get_rank(), dist.get_world_size() - 1
    pipe = penstock.Pipeline(
        subject.build(),
        sample=subject.sample,
        loss_fn=subject.loss_fn,
        optimizer=models.momentum,
        schedule=schedule,
        microbatches=3,
    )
    batches = make_batches(reads=rank in (0, last))
    losses = []
    for _ in range(2):
        for x, y in batches:
            losses.append(pipe.step(x if rank == 0 else shapes_of(x), y if rank == last else None).loss)
    pipe.drain()
    state = pipe.state_dict()["model"]
    pipe.close()
    return tuple(float(loss) for loss in losses), state


class Noisy(Dataset[Any]):
    """Sample i is i and random numbers of PyTorch, NumPy and Python, drawn anew each time."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [torch.rand(1).item(), numpy.random.rand(), random.random()]
        return {"index": index, "noise": torch.tensor(drawn, dtype=torch.float64)}


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def indices(batches: Any) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def test_every_process_gets_the_same_batches() -> None:
    """Transforms that draw random numbers included, whatever the generators of the process have come to."""
    seed_all(1)
    first = list(loader(Noisy(), 4, shuffle=True, seed=5))
    seed_all(2)
    second = list(loader(Noisy(), 4, shuffle=True, seed=5))

    assert [batch["index"].tolist() for batch in first] == [batch["index"].tolist() for batch in second]
    assert all(torch.equal(a["noise"], b["noise"]) for a, b in zip(first, second, strict=True))
    rows = [row for batch in first for row in batch["noise"].tolist()]
    assert [len(set(column)) for column in zip(*rows, strict=True)] == [10, 10, 10]


def test_the_generators_are_left_as_they_were() -> None:
    drawn = []
    for loads in (False, True):
        seed_all(1)
        if loads:
            list(prefetch(loader(Noisy(), 4, shuffle=True), "cpu"))
        drawn.append((torch.rand(3).tolist(), numpy.random.rand(), random.random()))

    assert drawn[0] == drawn[1]


def test_an_epoch_has_every_sample_once_and_its_own_order() -> None:
    batches = loader(Noisy(), 4, shuffle=True)
    epochs = [indices(batches) for _ in range(2)]

    assert [sorted(index for batch in epoch for index in batch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    batches.set_epoch(0)
    assert indices(batches) == epochs[0]
    assert indices(loader(Noisy(), 4)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_length_counts_batches() -> None:
    for drop_last, count in ((False, 3), (True, 2)):
        batches = loader(Noisy(), 4, drop_last=drop_last)
        assert len(batches) == len(list(batches)) == count


def test_transforms_of_a_loader_that_goes_on_draw_the_same_numbers() -> None:
    """Also where one batch was read ahead, and in a process whose generators have come to something else."""
    expected = [batch["noise"] for batch in loader(Noisy(), 3, seed=2)]
    stopped = iter(prefetch(first := loader(Noisy(), 3, seed=2), "cpu"))
    assert torch.equal(next(stopped)["noise"], expected[0])
    resumed = loader(Noisy(), 3, seed=2)
    resumed.load_state_dict(first.state_dict())
    assert first.position == 2, "one was read ahead"
    seed_all(7)

    assert all(torch.equal(batch["noise"], other) for batch, other in zip(resumed, expected[1:], strict=True))


def test_a_loader_goes_on_where_another_stopped() -> None:
    whole = loader(Noisy(), 3, shuffle=True, seed=2)
    expected = [indices(whole), indices(whole)]
    stopped = iter(first := loader(Noisy(), 3, shuffle=True, seed=2))
    seen = [next(stopped)["index"].tolist() for _ in range(2)]
    resumed = loader(Noisy(), 3, shuffle=True, seed=2)
    resumed.load_state_dict(first.state_dict())

    assert [seen + indices(resumed), indices(resumed)] == expected
    with pytest.raises(PenstockError, match="seed 2 and this one has seed 3"):
        loader(Noisy(), 3, seed=3).load_state_dict(first.state_dict())


def test_worker_processes_make_the_same_batches() -> None:
    plain, worked = (loader(Noisy(), 4, shuffle=True, num_workers=workers) for workers in (0, 1))

    assert indices(plain) == indices(worked)


def test_a_process_that_does_not_read_gets_shapes() -> None:
    class Watched(Noisy):
        def __getitem__(self, index: int) -> dict[str, Any]:
            assert index == 0
            return super().__getitem__(index)

    batches = list(loader(Watched(), 4, shuffle=True, reads=False))

    assert [tuple(batch["noise"].shape) for batch in batches] == [(4, 3), (4, 3), (2, 3)]
    assert all(tensor.is_meta for batch in batches for tensor in batch.values())
    assert batches[0]["index"].dtype == torch.int64


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_ranks_that_do_not_read_need_shapes_only(schedule: str, pool: Pool) -> None:
    subject = models.LAYERED
    batches = make_batches(reads=True)
    expected = penstock.reference_train(
        subject.build(),
        [pair for _ in range(2) for pair in batches],
        sample=subject.sample,
        loss_fn=subject.loss_fn,
        optimizer=models.momentum,
        schedule=schedule,
        stages=3,
        microbatches=3,
    )
    for losses, state in pool.run(3, train_where_read, schedule):
        assert losses == expected.losses
        assert all(torch.equal(tensor, expected.state[name]) for name, tensor in state.items())


def test_who_reads_what() -> None:
    subject = models.LAYERED
    chain = capture(subject.build(), subject.sample)
    stages = penstock.Plan.uniform(8, 3).stages
    readings = [find_inputs(chain, [stage]) for stage in stages]

    assert [(bool(reads.inputs), reads.target) for reads in readings] == [(True, False), (False, False), (False, True)]
    x, y = (tensor.to("meta") for tensor in subject.batches[0])
    absent = split(chain.inputs, x, y, 2)
    assert readings[1].checked(absent) is absent
    with pytest.raises(PenstockError, match=r"args\[0\]: on the meta device"):
        readings[0].checked(absent)
    with pytest.raises(PenstockError, match="the target: on the meta device"):
        readings[2].checked(split(chain.inputs, x, (y,), 2))


def test_batches_without_an_order_are_refused() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(PenstockError, match="Stream is an IterableDataset"):
        loader(Stream(), 2)


def test_prefetch_is_one_batch_ahead() -> None:
    taken: list[int] = []

    def source() -> Iterator[tuple[int, Tensor]]:
        for number in range(4):
            taken.append(number)
            yield number, torch.full((2,), number)

    seen = []
    for number, tensor in prefetch(source(), "cpu"):
        seen.append((number, int(tensor[0]), len(taken)))

    assert seen == [(0, 0, 2), (1, 1, 3), (2, 2, 4), (3, 3, 4)]


def test_an_error_comes_after_the_batches_before_it() -> None:
    def source() -> Iterator[int]:
        yield from range(2)
        raise OSError("disk")

    seen = []
    with pytest.raises(OSError, match="disk"):
        for number in prefetch(source(), "cpu"):
            seen.append(number)

    assert seen == [0, 1]


def test_the_state_behind_prefetched_batches_is_that_of_the_batch_in_use() -> None:
    expected = indices(loader(Noisy(), 3, shuffle=True))
    batches = loader(Noisy(), 3, shuffle=True)
    source = iter(ahead := prefetch(batches, "cpu"))
    seen = [next(source)["index"].tolist()]
    resumed = loader(Noisy(), 3, shuffle=True)
    resumed.load_state_dict(batches.state_dict())

    assert len(ahead) == 4
    assert seen + indices(resumed) == expected
    source.close()  # type: ignore[attr-defined]
    assert seen + indices(batches) == expected, "the batch ahead was not used"


def test_shapes_keep_what_is_no_tensor() -> None:
    shapes = shapes_of({"x": torch.ones(2, 3, dtype=torch.int32), "n": 5})

    assert (shapes["n"], shapes["x"].shape, shapes["x"].dtype, shapes["x"].is_meta) == (5, (2, 3), torch.int32, True)  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_on_the_device_and_right_while_it_computes() -> None:
    batches = [torch.full((1 << 20,), number, dtype=torch.float32) for number in range(20)]
    weights = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in prefetch(batches, "cuda"):
        assert batch.is_cuda
        for _ in range(5):
            weights = torch.tanh(weights @ weights)  # the device is busy when the next copy starts
        sums.append(batch.sum())
        del batch

    assert [float(total) for total in sums] == [number * float(1 << 20) for number in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nested_batches_come_whole() -> None:
    (batch,) = prefetch([{"x": (torch.ones(3), "name"), "on": torch.ones(2, device="cuda")}], "cuda")

    assert batch["x"][0].is_cuda and batch["x"][1] == "name"
    assert float(batch["on"].sum()) == 2.0  # type: ignore[attr-defined]


def test_tensors_stay_together() -> None:
    dataset = TensorDataset(torch.arange(6), torch.arange(6) * 2)

    assert all(torch.equal(2 * x, y) for x, y in loader(dataset, 2, shuffle=True))


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ((0, 99), r"set_epoch\(position=\): expected a whole number from 0 to 2, found 99"),
        ((-1,), r"set_epoch\(epoch=\): expected a whole number, 0 or more, found -1"),
        (("a",), "found 'a'"),
        ((True,), "found True"),
        ((0, 1.5), r"found 1\.5"),
        ((None,), "found nothing"),
    ],
)
def test_a_place_that_no_epoch_has_is_refused(place: tuple[Any, ...], named: str) -> None:
    batches = loader(TensorDataset(torch.arange(6)), batch_size=3)
    with pytest.raises(penstock.PenstockError, match=named):
        batches.set_epoch(*place)
    assert (batches.epoch, batches.position) == (0, 0)
