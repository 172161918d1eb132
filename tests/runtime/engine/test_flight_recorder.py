"""The flight recorder knows the position of every rank, at any time and from any thread."""

import threading
import time

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.engine.flight_recorder import FlightRecorder, FlightRow
from penstock.scheduling.definitions import Step
from penstock.scheduling.schedules import Schedule
from support import models

SCHEDULE = Schedule("1f1b-flush", ranks=2, microbatches=2)


def test_a_position_is_the_number_of_actions_that_are_done() -> None:
    recorder = FlightRecorder()
    assert (recorder.position().steps, recorder.position().rows) == (0, ())

    row = FlightRow(0, SCHEDULE.row(0, Step(0)))
    recorder.begin("step", SCHEDULE.placement, [row])
    begun = recorder.position().rows[0]
    assert (begun.done, begun.runs) == (0, False)

    now = time.perf_counter()
    row.starts += [now - 5.0, now - 3.0]
    row.stops += [now - 4.0]
    position = recorder.position()
    (found,) = position.rows
    assert (found.done, found.runs) == (1, True)
    assert found.seconds == pytest.approx(3.0, abs=1.0)
    assert (position.steps, position.segment) == (1, "step 0")
    assert [one.action for one in position.last] == ["0F0@0"]
    assert position.usual == {"0F": pytest.approx(1.0)}


def test_only_steps_are_counted_and_only_the_last_segments_kept() -> None:
    recorder = FlightRecorder()
    for kind in ["step"] * 20 + ["drain", "evaluation"]:
        row = FlightRow(0, SCHEDULE.row(0, Step(0))[:1], starts=[1.0], stops=[2.0])
        recorder.begin(kind, SCHEDULE.placement, [row])
    position = recorder.position()

    assert (position.steps, position.segment, len(position.last)) == (20, "evaluation", 8)


def test_a_position_is_taken_while_a_layer_computes() -> None:
    inside, leave = threading.Event(), threading.Event()

    class Layer(nn.Linear):
        waits = False

        def forward(self, x: Tensor) -> Tensor:
            if self.waits:
                inside.set()
                leave.wait(60)
            return torch.tanh(super().forward(x))

    second = Layer(3, 3)
    layers, x = nn.Sequential(Layer(3, 3), second), torch.randn(4, 3)
    pipe = penstock.Pipeline(layers, (x[:2],), nn.functional.mse_loss, models.plain, stages=2, microbatches=2)
    pipe.step(x, x)
    second.waits = True
    training = threading.Thread(target=lambda: pipe.step(x, x))
    training.start()
    assert inside.wait(60)
    position = pipe._engine.recorder.position()
    leave.set()
    training.join()

    assert position.segment == "step 1"
    assert [row.program[row.done] for row in position.rows if row.runs] == ["1F2@1"]
    assert pipe._engine.recorder.position().rows[1].done == len(position.rows[1].program)
