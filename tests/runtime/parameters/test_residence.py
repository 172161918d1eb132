"""Weights and gradients that come and go beside computation, on a device whose streams progress in any order."""

import gc
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.host_stores import MemoryStore
from penstock.runtime.devices.staging import DeviceStaging
from penstock.runtime.parameters.host_states import HostStates
from penstock.runtime.parameters.residence import Residence, StreamedWeights
from penstock.runtime.parameters.version_slots import AS_STEPPED
from support.simulated.simulated_device import Forgetful, Hasty, SimulatedDevice

LAYOUT: Layout = (torch.Size((3, 5)), (5, 1), torch.float64)
STAGES = 3


def filled(device: SimulatedDevice, value: float) -> Tensor:
    made = device.device_memory(LAYOUT, device.current())
    device.fill(made, value)
    return made


def visit(device: SimulatedDevice, steps: int = 2) -> list[list[float]]:
    """Visits stages in turn, the next one fetched ahead. Each adds a gradient in two visits. Returns what was read on
    the device, and in the end at home.
    """
    streamed = StreamedWeights(HostStates(MemoryStore(DeviceStaging(cast(Any, device))), torch.device("cpu")))
    weights = [{"w": nn.Parameter(filled(device, stage))} for stage in range(STAGES)]
    for stage, own in enumerate(weights):
        streamed.adopt(own, stage, AS_STEPPED)
    residences = [Residence(streamed, own) for own in weights]
    aside: list[dict[str, Tensor]] = [{} for _ in weights]
    found = []
    order = [*range(STAGES)] * steps
    residences[0].fetch(aside[0])
    for number, stage in enumerate(order):
        if number + 1 < len(order):
            residences[order[number + 1]].fetch(aside[order[number + 1]])
        residences[stage].arrive()
        found.append(device.read(weights[stage]["w"].data))
        if aside[stage]:
            found.append(device.read(aside[stage]["w"]))
        aside[stage]["w"] = filled(device, 10 * number + stage)
        residences[stage].release([aside[stage]])
    streamed.host.settle()
    for stage in range(STAGES):
        found += [weights[stage]["w"].flatten().tolist(), aside[stage]["w"].flatten().tolist()]
    device.finish()
    return found


def come_back(device: SimulatedDevice) -> list[list[float]]:
    """What is read of a gradient that leaves and comes back at once."""
    streamed = StreamedWeights(HostStates(MemoryStore(DeviceStaging(cast(Any, device))), torch.device("cpu")))
    weights = {"w": nn.Parameter(filled(device, 1.0))}
    streamed.adopt(weights, 0, AS_STEPPED)
    residence, aside, found = Residence(streamed, weights), dict[str, Tensor](), []
    for number in range(4):
        residence.fetch(aside)
        residence.arrive()
        if number:
            found.append(device.read(aside["w"]))
        aside["w"] = filled(device, number)
        residence.release([aside])
    streamed.host.settle()
    device.finish()
    return found


EXPECTED = [
    *([value] * 15 for value in (0.0, 1.0, 2.0)),
    *([value] * 15 for value in (0.0, 0.0, 1.0, 11.0, 2.0, 22.0)),
    *([value] * 15 for value in (0.0, 30.0, 1.0, 41.0, 2.0, 52.0)),
]


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_what_is_computed_with_and_kept_is_right_in_any_order(seed: int) -> None:
    assert visit(SimulatedDevice(seed)) == EXPECTED


@pytest.mark.parametrize("seed", range(5))
def test_gradients_come_back_when_they_have_left(seed: int) -> None:
    assert come_back(SimulatedDevice(seed)) == [[value] * 15 for value in (0.0, 1.0, 2.0)]


def test_the_simulated_device_finds_what_is_out_of_order() -> None:
    assert not all(visit(Hasty(seed)) == EXPECTED for seed in range(50))
    gc.collect()


def test_nothing_depends_on_memory_that_the_allocator_keeps_for_a_stream() -> None:
    assert all(visit(Forgetful(seed)) == EXPECTED for seed in range(50))


@pytest.mark.parametrize("users", [1, 2])
def test_a_weight_stays_while_a_stage_or_replica_needs_it(users: int) -> None:
    device = SimulatedDevice(0)
    streamed = StreamedWeights(HostStates(MemoryStore(DeviceStaging(cast(Any, device))), torch.device("cpu")))
    weights = {"w": nn.Parameter(filled(device, 1.0))}
    streamed.adopt(weights, 0, AS_STEPPED)
    residences = [Residence(streamed, weights) for _ in range(users)]
    for residence in residences:
        residence.fetch({})
    for left, residence in enumerate(reversed(residences)):
        residence.arrive()
        assert not streamed.host.is_home(weights["w"]), left
        residence.release(())
    assert streamed.host.is_home(weights["w"])
    device.finish()
