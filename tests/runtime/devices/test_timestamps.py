"""Timestamps of a device are the times at which it reaches them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.devices.timestamps import DeviceTimer
from support.simulated.simulated_device import SimulatedDevice


class Noted:
    """A timestamp between two operations of its stream, which note when the device executes them."""

    def __init__(self, device: SimulatedDevice, timer: DeviceTimer) -> None:
        self.times: list[float] = []
        device.do(device.current(), self.note)
        self.timestamp = timer.now()
        device.do(device.current(), self.note)

    def note(self) -> None:
        self.times.append(time.perf_counter())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(
        st.one_of(st.tuples(st.just("take"), st.integers(0, 1)), st.tuples(st.just("advance"), st.integers(1, 8))),
        max_size=60,
    ),
)
def test_a_timestamp_has_the_time_of_its_place_in_the_stream(seed: int, actions: list[tuple[str, int]]) -> None:
    device = SimulatedDevice(seed)
    timer, streams, held = DeviceTimer(device), [device.stream(), device.stream()], list[Noted]()
    for action, number in actions:
        if action == "take":
            with device.on(streams[number]):
                held.append(Noted(device, timer))
        elif action == "advance":
            for _ in range(number):
                device.advance()
    device.finish()
    for noted in held:
        before, after = noted.times
        assert before <= noted.timestamp.passed_at <= after  # type: ignore[attr-defined]
    host_seconds = timer.to_host_seconds([noted.timestamp for noted in held])
    # The device's clock is synchronized with the host's once for all of them.
    shifts = [seconds - noted.timestamp.passed_at for noted, seconds in zip(held, host_seconds, strict=True)]  # type: ignore[attr-defined]
    assert all(shift >= 0 and shift == pytest.approx(shifts[0], abs=1e-6) for shift in shifts)
