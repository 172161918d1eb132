"""The picture of README.md: steps of one model under two schedules, as two processes of a machine have measured them.

    python benchmarks/two_schedules.py --save docs/pictures/two-schedules.svg

Both schedules train the same GPT on the same minibatch, in turn. Of the steps of each that with the median length is
drawn. It takes half a minute. The picture has light and dark colors, by the setting of the reader.

    python benchmarks/two_schedules.py --compile --size medium > benchmarks/results/compiled-halves.txt

prints the median seconds of a step instead, of both schedules as they are and compiled by Inductor: whole stages under
the first one, and each layer under the second one, which splits backwards.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

import penstock
from contenders.jobs import JOBS, MICROBATCH_SIZE, Job, sgd
from measurement.launches import launch
from measurement.reports import conditions
from penstock.timelines.drawings import timeline_svg

SCHEDULES = {"1f1b-flush": 1, "zb-v": 2}
"""The stages of each process."""
PROCESSES, MICROBATCHES, WARM_UP = 2, 4, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, default=Path("two-schedules.svg"), help="the picture")
    parser.add_argument("--size", choices=JOBS, default="big", help="of the model")
    parser.add_argument("--steps", type=int, default=21, help="steps to take the median of")
    parser.add_argument("--compile", action="store_true", help="print seconds, also of compiled stages, instead")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        timelines = measure(options.size, options.steps, (False, True) if options.compile else (False,))
        if torch.distributed.get_rank() > 0:
            return
        if options.compile:
            for name, timeline in timelines.items():
                print(f"{name:<20} {timeline.seconds * 1e3:8.1f} ms")
        else:
            options.save.write_text(draw(timelines), encoding="utf-8")
        return
    given = ["--save", str(options.save.resolve()), "--size", options.size, "--steps", str(options.steps), "--worker"]
    if options.compile:
        print(conditions("benchmarks/two_schedules.py"), flush=True)
        launch(__file__, PROCESSES, [*given, "--compile"])
        return
    launch(__file__, PROCESSES, given)
    print(f"wrote {options.save}")


def measure(size: str, steps: int, compiled: Sequence[bool] = (False,)) -> dict[str, penstock.Timeline]:
    """The step of median length under each schedule; they take turns. Every process calls it."""
    job = JOBS[size]
    inputs, target = job.batch(MICROBATCHES)
    with ExitStack() as opened:
        pipes = {
            name + ", compiled" * on: opened.enter_context(build(job, name, inputs, on))
            for name in SCHEDULES
            for on in compiled
        }
        measured: dict[str, list[penstock.Timeline]] = {name: [] for name in pipes}
        for _ in range(WARM_UP + steps):
            for name, pipe in pipes.items():
                pipe.step(inputs, target)
                measured[name].append(pipe.timeline())
    return {
        name: sorted(found[WARM_UP:], key=lambda timeline: timeline.seconds)[steps // 2]
        for name, found in measured.items()
    }


def build(job: Job, schedule: str, inputs: Tensor, compiled: bool = False) -> penstock.Pipeline:
    return penstock.Pipeline(
        job.build(),
        sample=(inputs[:MICROBATCH_SIZE],),
        loss_fn=job.loss,
        optimizer=sgd,
        schedule=schedule,
        microbatches=MICROBATCHES,
        stages=PROCESSES * SCHEDULES[schedule],
        compile=compiled,
    )


def draw(timelines: dict[str, penstock.Timeline]) -> str:
    """The picture (SVG) of the timelines by name, one below the other on one time axis."""
    return timeline_svg([timeline.panel(name) for name, timeline in timelines.items()])


if __name__ == "__main__":
    main()
