"""A schedule of one's own, in thirty lines: 1F1B that runs twice as far ahead, so that slow links are hidden.

python examples/own_schedule.py                                     all stages in this process
torchrun --nproc-per-node 2 examples/own_schedule.py --stages 2     a process for each
"""

import argparse
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.scheduling import Backward, Compute, Forward, Guarantees, PipelineShape, Segment, Step, Update


def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Compute]:
    """What `rank` computes in a step; the drain of a schedule that flushes has nothing to do."""
    if not isinstance(segment, Step):
        return
    (stage,) = shape.stages_of(rank)
    version = minibatch = segment.minibatch  # one update per minibatch, so that minibatch t reads version t
    microbatches = shape.microbatches_of(minibatch)
    ahead = 2 * (shape.stages - stage) - 2
    for turn in range(len(microbatches) + ahead):
        if turn < len(microbatches):
            yield Forward(stage, microbatches[turn], version)
        if turn >= ahead:
            yield Backward(stage, microbatches[turn - ahead], version)
    yield Update(stage, version + 1, version)


def guarantees(shape: PipelineShape) -> Guarantees:
    """What stays in flight on each stage; the verifier checks it, and buffers and memory are planned by it."""
    most = [2 * (shape.stages - stage) - 1 for stage in range(shape.stages)]
    return Guarantees.of(shape, in_flight=[min(count, shape.microbatches) for count in most])


EAGER = penstock.ScheduleDefinition("eager", order, guarantees)


def main() -> None:
    """Trains a small network under `EAGER`, and computes the same without a pipeline."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stages", type=int, default=2)
    stages = parser.parse_args().stages
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2 * stages)))
    batches = [(torch.randn(32, 32), torch.randn(32, 32)) for _ in range(5)]
    options = {
        "sample": (torch.randn(4, 32),),
        "loss_fn": F.mse_loss,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "schedule": EAGER,
        "microbatches": 8,
        "stages": stages,
    }
    reference = penstock.reference_train(model, batches, **options)
    pipe = penstock.Pipeline(model, **options)  # proves the schedule first; a wrong one is an error here
    losses = [float(pipe.step(x, y).loss) for x, y in batches]
    if pipe.rank == 0:
        print(penstock.render(pipe.schedule))
        print(penstock.verify(pipe.schedule))
        print(f"losses: {', '.join(f'{loss:.4f}' for loss in losses)}")
        print(f"equal to one device: {losses == list(reference.losses)}")
    pipe.close()


if __name__ == "__main__":
    main()
