"""Copies between a device and host memory: ordered correctly in whatever order the streams progress."""

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.host_copies import HostCopier
from penstock.runtime.devices.staging import DeviceStaging, HostStaging
from support.jobs.staging_jobs import exchange_over_gloo, sum_over_gloo
from support.processes import Pool
from support.simulated.simulated_device import Forgetful, Hasty, SimulatedDevice

LAYOUT: Layout = (torch.Size((3, 5)), (1, 3), torch.float64)
SEEDS = st.integers(0, 2**32)


def send(device: SimulatedDevice, values: list[float]) -> list[Tensor]:
    """Computes, stages and drops tensors one after the other. Returns their copies on the host."""
    staging, found = DeviceStaging(device), []
    for value in values:
        tensor = device.device_memory(LAYOUT, device.current())
        device.fill(tensor, value)
        (copy,), there = staging.to_host([tensor])
        del tensor
        found.append(copy)
        if value % 2:
            there.synchronize()
            assert copy.tolist() == torch.full((3, 5), value).tolist()
    device.finish()
    return found


def receive(device: SimulatedDevice, values: list[float]) -> list[list[float]]:
    """Stages tensors from the host to the device and drops them. Returns what the computing stream reads of them."""
    staging, found = DeviceStaging(device), []
    for value in values:
        host = staging.host_memory(LAYOUT)
        host.fill_(value)
        staged = staging.to_device([host])
        del host
        (tensor,) = staging.wait_for(staged)
        del staged
        found.append(device.read(tensor))
        del tensor
    device.finish()
    return found


@settings(deadline=None, max_examples=80)
@given(SEEDS)
def test_what_is_sent_is_what_was_computed(seed: int) -> None:
    values = [1.0, 2.0, 4.0, 3.0]

    found = send(SimulatedDevice(seed), values)

    assert [copy.tolist() for copy in found] == [torch.full((3, 5), value).tolist() for value in values]
    assert {copy.stride() for copy in found} == {(1, 3)}


@settings(deadline=None, max_examples=80)
@given(SEEDS)
def test_what_is_computed_with_is_what_has_come(seed: int) -> None:
    assert receive(SimulatedDevice(seed), [1.0, 2.0, 3.0]) == [[value] * 15 for value in (1.0, 2.0, 3.0)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [Forgetful, Hasty])
@pytest.mark.parametrize("work", [send, receive])
def test_the_simulated_device_finds_what_is_out_of_order(
    kind: type[SimulatedDevice], work: Callable[[SimulatedDevice, list[float]], list[object]]
) -> None:
    """Without either of the rules, some order of the streams gives other numbers."""

    def right(found: list[object]) -> bool:
        numbers = [one.flatten().tolist() if isinstance(one, Tensor) else one for one in found]
        return numbers == [[value] * 15 for value in (2.0, 4.0, 6.0)]

    assert right(work(SimulatedDevice(0), [2.0, 4.0, 6.0]))
    assert not all(right(work(kind(seed), [2.0, 4.0, 6.0])) for seed in range(50))
    gc.collect()


@pytest.mark.parametrize("seed", range(3))
def test_messages_of_a_device_over_gloo(pool: Pool, seed: int) -> None:
    _, found = pool.run(2, exchange_over_gloo, seed, 12)

    assert found == [[float(number)] * 600 for number in range(12)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_a_device_over_gloo(pool: Pool, ranks: int) -> None:
    for found in pool.run(ranks, sum_over_gloo, 4):
        assert found == [[float(ranks * number + sum(range(ranks)))] * 7 for number in range(4)]


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_the_memory_of_copies_is_used_again(on_device: bool) -> None:
    """To pin new memory would hold the training up at every save."""
    device = SimulatedDevice(0)
    copier = HostCopier(DeviceStaging(device) if on_device else HostStaging(), torch.device("cpu"))
    tensor = device.device_memory(LAYOUT, device.current())
    places = []
    for value in (1.0, 2.0):
        device.fill(tensor, value)
        if not on_device:
            device.finish()
        copies = copier.start([tensor])
        copier.order_after(copies)
        copies.wait()
        assert copies.tensors[0].tolist() == torch.full((3, 5), value).tolist()
        places.append(copies.tensors[0].data_ptr())
        copier.recycle(copies.tensors)
    copier.close()

    assert places[0] == places[1]
