"""Ranks that share a device, each on its own stream: ordered correctly in whatever order the streams progress."""

import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.staging import DeviceStaging
from penstock.runtime.devices.streams import DeviceStreams, UpdateOrder
from penstock.runtime.devices.timestamps import DeviceTimer
from penstock.runtime.transport.transport import Edge, LoopbackTransport
from support.simulated.simulated_device import Hasty, SimulatedDevice

LAYOUT: Layout = (torch.Size((3,)), (1,), torch.float64)
SEEDS = st.integers(0, 2**32)
DeviceWork = Callable[[SimulatedDevice], bool]


def made(device: SimulatedDevice, value: float) -> Tensor:
    """A tensor that is computed in the current stream."""
    tensor = device.device_memory(LAYOUT, device.current())
    device.fill(tensor, value)
    return tensor


def messages(device: SimulatedDevice) -> bool:
    """Two ranks of one process send each other tensors, and drop them. Returns whether each read what was sent."""
    streams, transport = DeviceStreams(device, (0, 1)), LoopbackTransport(DeviceStaging(device))
    found = []
    with streams.ordered_segment():
        for number in range(4):
            for source, target in ((0, 1), (1, 0)):
                edge = Edge(source, target)
                with streams.on(source):
                    transport.send(edge, "kind", (made(device, 2.0 * number + source), None))
                with streams.on(target):
                    tensor, nothing = transport.post(edge, "kind").wait()
                    assert tensor is not None and nothing is None
                    found.append(device.read(tensor))
                    del tensor
    device.finish()
    return found == [[float(number)] * 3 for number in range(8)]


def segments(device: SimulatedDevice) -> bool:
    """The caller writes before a segment and reads after it what two ranks have written. Returns whether all read the
    newest values.
    """
    streams = DeviceStreams(device, (0, 1))
    batch = device.device_memory(LAYOUT, device.current())
    results = [device.device_memory(LAYOUT, device.current()) for _ in range(2)]
    found = []
    for number in range(3):
        device.fill(batch, float(number))
        with streams.ordered_segment():
            for rank in range(2):
                with streams.on(rank):
                    found.append(device.read(batch))
                    device.fill(results[rank], float(number))
        found += [device.read(result) for result in results]
    device.finish()
    return found == [[float(number)] * 3 for number in range(3) for _ in range(4)]


def updates(ranks: int, delay: int) -> DeviceWork:
    """Weights in two slots, of which forwards read the version `delay` behind the newest. The last rank updates them,
    and rank 0 reads them as well. Returns whether every reader, and every update of its gradients, found the right
    values.
    """

    def work(device: SimulatedDevice) -> bool:
        streams = DeviceStreams(device, range(ranks))
        orders: list[UpdateOrder] = []
        for rank in range(ranks):
            order = streams.order(rank, [other for other in range(ranks) if other != rank])
            assert order is not None
            orders.append(order)
        slots = [device.device_memory(LAYOUT, device.current()) for _ in range(2)]
        for slot in slots:
            device.fill(slot, 0.0)
        found = []
        for version in range(1, 6):
            with streams.ordered_segment():
                for rank in range(ranks):
                    used = max(0, version - 1 - delay)
                    with streams.on(rank):
                        orders[rank].read(used)
                        found.append((used, device.read(slots[used % 2])))
                        orders[rank].settle()
                        gradient = made(device, float(version))
                        if rank + 1 < ranks:
                            continue
                        with orders[rank].making(version, {"weight": gradient}):
                            found.append((version, device.read(gradient)))
                            device.fill(slots[version % 2], float(version))
                        del gradient
        device.finish()
        return all(values == [float(value)] * 3 for value, values in found)

    return work


WORK: dict[str, DeviceWork] = {
    "messages": messages,
    "segments": segments,
    "updates of one rank": updates(1, 0),
    "delayed updates of one rank": updates(1, 1),
    "updates of two ranks": updates(2, 0),
    "delayed updates of two ranks": updates(2, 1),
}


@pytest.mark.parametrize("name", WORK)
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS)
def test_the_order_is_right_whatever_order_the_device_takes(name: str, seed: int) -> None:
    assert WORK[name](SimulatedDevice(seed))


@pytest.mark.parametrize("name", WORK)
def test_without_events_the_order_is_wrong(name: str) -> None:
    assert not all(WORK[name](Hasty(seed)) for seed in range(50))


def test_gradients_are_kept_until_the_rank_has_waited_for_the_update() -> None:
    """And no longer: rank 0 continues with an older version, and releases them before it makes others."""
    device = SimulatedDevice(0)
    streams = DeviceStreams(device, (0,))
    order = streams.order(0, ())
    assert order is not None
    gradient = made(device, 1.0)
    with order.making(2, {"weight": gradient}):
        pass
    held = weakref.ref(gradient)
    del gradient
    order.read(1)

    assert held() is not None
    order.settle()
    assert held() is None


def test_timestamps_of_a_device_are_when_it_reached_them() -> None:
    device = SimulatedDevice(0)
    timer = DeviceTimer(device)
    first = timer.now()
    assert not timer.passed(first)
    second = timer.now()
    one, other = timer.to_host_seconds([first, second])

    assert timer.passed(first) and timer.passed(second)
    assert 0 <= other - one == pytest.approx(timer.seconds(first, second), abs=1e-6)
