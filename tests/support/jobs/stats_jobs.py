"""Training with statistics: in the test's process, and in those of the pool."""

import torch
from torch import Tensor

import penstock
from support.training import Case


class Recorder:
    """Remembers what is logged, with the method of a run of Weights & Biases."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((step, data))


def count(target: Tensor) -> float:
    """Three items for a sample."""
    return 3.0 * len(target)


def stats_of_all_ranks(case: Case) -> tuple[penstock.Stats, penstock.Stats]:
    """The statistics of this rank alone, and of all."""
    with penstock.Pipeline(case.build(), **case.options, loss_weight=count) as pipe:
        for x, y in case.batches[:3]:
            pipe.step(x, y)
        torch.distributed.barrier()
        return pipe.stats(), pipe.stats(all_ranks=True)


def log_on_rank_0(case: Case, all_ranks: bool) -> list[tuple[int, dict[str, float]]]:
    """What rank 0 logs of every second step; the other ranks have no writer."""
    recorder = Recorder()
    with penstock.Pipeline(case.build(), **case.options) as pipe:
        for step, (x, y) in enumerate(case.batches[:4], 1):
            result = pipe.step(x, y)
            penstock.log_stats(pipe, recorder if pipe.rank == 0 else None, step, result, every=2, all_ranks=all_ranks)
    return recorder.logged
