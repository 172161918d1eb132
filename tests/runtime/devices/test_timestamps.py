"""Timestamps of a device: their events are recorded again, and a timestamp that is referenced keeps its value."""

import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock.runtime.devices.timestamps import DeviceTimer
from penstock.timelines import Timeline
from penstock.values import Prediction
from support.simulated.simulated_device import SimulatedDevice
from support.simulated.stream_races import RacingDevice, RacingEvent, on_streams
from support.training import Case, stages_on_a_rank

SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "zb-v", "pipedream", "2bw")
STEPS = 30
EARLY = 12
"""Steps after which the timings of the first ones have been dropped, and the check of the prediction has its steps."""


class Noted:
    """A timestamp between two operations of its stream, which note when the device executes them."""

    def __init__(self, device: SimulatedDevice, timer: DeviceTimer) -> None:
        self.times: list[float] = []
        device.do(device.current(), self.note)
        self.timestamp = timer.now()
        device.do(device.current(), self.note)

    def note(self) -> None:
        self.times.append(time.perf_counter())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(0, 1)),
            st.tuples(st.just("drop"), st.integers(0, 20)),
            st.tuples(st.just("advance"), st.integers(1, 8)),
        ),
        max_size=60,
    ),
)
def test_a_timestamp_that_is_referenced_keeps_its_value(seed: int, actions: list[tuple[str, int]]) -> None:
    """Whichever timestamps are dropped before or after the device has reached them, on whichever streams."""
    device = SimulatedDevice(seed)
    timer, streams, held = DeviceTimer(device), [device.stream(), device.stream()], list[Noted]()
    for action, number in actions:
        if action == "take":
            with device.on(streams[number]):
                held.append(Noted(device, timer))
        elif action == "drop" and held:
            del held[number % len(held)]
        elif action == "advance":
            for _ in range(number):
                device.advance()
    assert len({id(noted.timestamp.event) for noted in held}) == len(held)
    device.finish()
    for noted in held:
        before, after = noted.times
        assert before <= noted.timestamp.event.passed_at <= after  # type: ignore[attr-defined]
    host_seconds = timer.to_host_seconds([noted.timestamp for noted in held])
    # The device's clock is synchronized with the host's once for all of them.
    shifts = [seconds - noted.timestamp.event.passed_at for noted, seconds in zip(held, host_seconds, strict=True)]  # type: ignore[attr-defined]
    assert all(shift >= 0 and shift == pytest.approx(shifts[0], abs=1e-6) for shift in shifts)


def test_the_event_of_a_dropped_timestamp_is_recorded_again() -> None:
    device = SimulatedDevice(0)
    timer = DeviceTimer(device)
    first, second = timer.now(), timer.now()
    event, record = first.event, ("what was done", first)
    del first
    assert timer.now().event is not event, "a record refers to it"

    del record
    again = timer.now()
    assert again.event is event is not second.event
    assert not timer.passed(again), "the device has yet to come there"


class Ticking(RacingDevice):
    """Its clock advances by one with every timestamp. `reuses`: whether events are recorded again."""

    def __init__(self, reuses: bool) -> None:
        super().__init__()
        self.made = self.ticks = 0
        self._reuses = reuses

    def record_timed_event(self, event: RacingEvent | None = None) -> RacingEvent:
        self.made += event is None
        self.ticks += 1
        found = super().record_timed_event(event if self._reuses else None)
        found.at = float(self.ticks)
        return found


def train(case: Case, device: Ticking) -> tuple[list[Timeline], list[int], float | None]:
    """Timelines of some last steps, read during the training; the number of events after each step; and the error of
    the prediction.
    """
    timelines, made = [], []
    with on_streams(device):
        plan: Any = case.options["plan"]
        plan = replace(plan, predicted=Prediction(100.0, 1.0, 1.0, (1.0,) * plan.ranks, 0.1))
        pipe = penstock.Pipeline(case.build(), **{**case.options, "plan": plan})
        for step in range(STEPS):
            x, y = case.batches[step % 4]
            float(pipe.step(x, y).loss)
            made.append(device.made)
            if step in (5, 20, STEPS - 1):
                timelines += [pipe.timeline(1), pipe.timeline(8)]
        error = pipe.prediction_error()
        pipe.close()
    return timelines, made, error


CASES = [
    *(Case("perceptron", schedule, 2, 4, stages_per_rank=stages_on_a_rank(schedule)) for schedule in SCHEDULES),
    # The sum of gradients starts in a backward, which keeps the timestamp for the timing of the sum.
    *(Case("perceptron", schedule, 2, 4, replicas=(2, 1)) for schedule in ("1f1b-flush", "pipedream", "2bw")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule}{'-replicas' if case.replicas else ''}")
def test_timelines_are_the_same_with_far_fewer_events(case: Case) -> None:
    always_new, again = Ticking(reuses=False), Ticking(reuses=True)
    (expected, _, error), (found, made, same) = train(case, always_new), train(case, again)

    assert (error, always_new.ticks) == (same, again.ticks)
    assert error is not None
    for one, other in zip(expected, found, strict=True):
        assert [(span.rank, span.action) for span in one.spans] == [(span.rank, span.action) for span in other.spans]
        for span, like in zip(one.spans, other.spans, strict=True):
            assert like.start_seconds == pytest.approx(span.start_seconds, abs=1e-6)
            assert like.stop_seconds == pytest.approx(span.stop_seconds, abs=1e-6)
    assert made[EARLY] == made[-1] < again.ticks / 2
