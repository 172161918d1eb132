"""Jobs in which tensors of simulated devices travel between processes."""

import uuid

import torch
import torch.distributed as dist

from penstock.runtime.devices.communicators import Members, connect_gloo
from penstock.runtime.devices.staging import DeviceStaging
from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.gloo.all_reduce import GroupSum
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.gloo.senders import GlooOutbox
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.ordered_all_reduce import Agreement
from penstock.runtime.transport.timeouts import Timeout
from penstock.runtime.transport.transport import Edge
from support.simulated.simulated_device import SimulatedDevice
from support.simulated.stream_races import RacingDevice

__all__ = ["exchange_over_gloo", "members", "sum_over_gloo", "sum_over_nccl"]

LAYOUT = torch.Size((20, 30)), (30, 1), torch.float64


def _patience() -> Timeout:
    store = dist.distributed_c10d._get_default_store()
    return Timeout(FailureBoard(store, dist.get_rank(), dist.get_world_size()), 30.0)


def _store() -> dist.Store:
    """One that no other job has used. Collective."""
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names)
    return dist.PrefixStore(names[0], dist.distributed_c10d._get_default_store())


def members(ranks: tuple[int, ...]) -> Members:
    """These, who meet where no others do. Collective."""
    return Members("a group", tuple(sorted(ranks)), dist.get_rank(), _store(), 60.0)


def exchange_over_gloo(seed: int, messages: int) -> list[list[float]]:
    """Rank 0 sends messages that its device is still to compute, and overwrites what it has sent; what the device of
    rank 1 reads of them.
    """
    edge, device = Edge(0, 1), SimulatedDevice(seed)
    group = connect_gloo(members((0, 1)))
    found: list[list[float]] = []
    if dist.get_rank() == 0:
        outbox = GlooOutbox(edge, group, 1, DeviceStaging(device))
        for number in range(messages):
            tensor = device.device_memory(LAYOUT, device.current())
            device.fill(tensor, float(number))
            outbox.put("form", (tensor, None))
            del tensor
        assert outbox.flushed(30.0)
        outbox.close()
        assert outbox.join(30.0)
    else:
        inbox = GlooInbox(edge, group, 0, DeviceStaging(device), _patience())
        tickets = [inbox.post("form") for _ in range(messages)]
        while tickets:
            tensor, nothing = tickets.pop(0).wait()  # type: ignore[assignment]
            assert tensor is not None and nothing is None
            found.append(device.read(tensor))
            del tensor
        device.finish()
        inbox.close()
        assert inbox.join(30.0)
    dist.barrier()
    return found


def sum_over_gloo(sums: int) -> list[list[float]]:
    """What the device of each rank reads of sums of numbers that the devices are still to compute."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    device, timeout = SimulatedDevice(rank), _patience()
    agreement = Agreement(ranks, rank, _store(), timeout)
    summing = GroupSum(ranks, connect_gloo(members(ranks)), rank, agreement, DeviceStaging(device), timeout)
    found = []
    for number in range(sums):
        own = device.device_memory((torch.Size((7,)), (1,), torch.float64), device.current())
        device.fill(own, float(rank + number))
        ticket = summing.add("form", own)
        del own
        (total,) = ticket.wait()
        assert total is not None
        found.append(device.read(total))
        del total, ticket
    device.finish()
    summing.close()
    assert summing.join(30.0)
    dist.barrier()
    return found


def sum_over_nccl(sums: int) -> list[list[float]]:
    """As `sum_over_gloo`, by what sums on a stream; here over Gloo, since NCCL takes GPUs."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    device, timeout = RacingDevice(), _patience()
    agreement, cpu = Agreement(ranks, rank, _store(), timeout), torch.device("cpu")
    staging, check = DeviceStaging(device), timeout.board.check
    summing = NcclSum(ranks, connect_gloo(members(ranks)), rank, agreement, cpu, device, staging, check, lambda _: None)
    summing.meet()
    summing.agree({"form": (7, torch.float32)})
    found = []
    for number in range(sums):
        (total,) = summing.add("form", torch.full((7,), float(rank + number))).wait()
        assert total is not None
        found.append(total.tolist())
    assert summing.join(30.0)
    dist.barrier()
    return found
