"""Jobs in which tensors of simulated devices travel between processes."""

import uuid

import torch
import torch.distributed as dist

from penstock.runtime.collectives.failures import FailureBoard
from penstock.runtime.collectives.store_gathers import StoreGather
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.devices.communicators import Members, connect_gloo
from penstock.runtime.devices.staging import DeviceStaging
from penstock.runtime.transport.gloo.receivers import GlooInbox
from penstock.runtime.transport.gloo.senders import GlooOutbox
from penstock.runtime.transport.message_headers import ReceivedKinds, SentKinds
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.ordered_all_reduce import Agreement, GlooSum, OrderedSum
from penstock.runtime.transport.transport import Edge
from support.simulated.simulated_device import SimulatedDevice
from support.simulated.stream_races import RacingDevice

LAYOUT = torch.Size((20, 30)), (30, 1), torch.float64


def _timeout() -> Timeout:
    store = dist.distributed_c10d._get_default_store()
    return Timeout(FailureBoard(store, dist.get_rank(), dist.get_world_size()), 30.0)


def _store() -> dist.Store:
    """Makes a store that no other job has used. Collective."""
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names)
    return dist.PrefixStore(names[0], dist.distributed_c10d._get_default_store())


def _agreement(ranks: tuple[int, ...], timeout: Timeout) -> Agreement:
    """Makes an agreement that no other job has used. Collective."""
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names)
    return Agreement(StoreGather(names[0], dist.get_rank(), ranks, timeout))


def members(ranks: tuple[int, ...]) -> Members:
    """Makes members with a store of their own. Collective."""
    return Members("a group", tuple(sorted(ranks)), dist.get_rank(), _store(), 60.0)


def exchange_over_gloo(seed: int, messages: int) -> list[list[float]]:
    """Rank 0 sends messages that its device has yet to compute, and reuses their memory. Returns what the device of
    rank 1 reads of them.
    """
    edge, device = Edge(0, 1), SimulatedDevice(seed)
    group = connect_gloo(members((0, 1)))
    found: list[list[float]] = []
    if dist.get_rank() == 0:
        outbox = GlooOutbox(SentKinds(edge), group, 1, DeviceStaging(device))
        for number in range(messages):
            tensor = device.device_memory(LAYOUT, device.current())
            device.fill(tensor, float(number))
            outbox.put("kind", (tensor, None))
            del tensor
        assert outbox.flushed(30.0)
        assert outbox.join(30.0)
    else:
        inbox = GlooInbox(ReceivedKinds(edge), group, 0, DeviceStaging(device), _timeout())
        receives = [inbox.post("kind") for _ in range(messages)]
        while receives:
            tensor, nothing = receives.pop(0).wait()  # type: ignore[assignment]
            assert tensor is not None and nothing is None
            found.append(device.read(tensor))
            del tensor
        device.finish()
        assert inbox.join(30.0)
    dist.barrier()
    return found


def sum_over_gloo(sums: int) -> list[list[float]]:
    """Sums numbers that the devices have yet to compute. Returns what the device of each rank reads of the sums."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    device, timeout = SimulatedDevice(rank), _timeout()
    agreement = _agreement(ranks, timeout)
    ordered_sum = OrderedSum(ranks, connect_gloo(members(ranks)), rank)
    summing = GlooSum(ordered_sum, agreement, DeviceStaging(device), timeout)
    summing.agree({"kind": (7, torch.float64)})
    found = []
    for number in range(sums):
        own = device.device_memory((torch.Size((7,)), (1,), torch.float64), device.current())
        device.fill(own, float(rank + number))
        receive = summing.add("kind", own)
        del own
        (total,) = receive.wait()
        assert total is not None
        found.append(device.read(total))
        del total, receive
    device.finish()
    assert summing.join(30.0)
    dist.barrier()
    return found


def sum_over_nccl(sums: int) -> list[list[float]]:
    """Like `sum_over_gloo`, with the sums on a stream. They run over Gloo here, since NCCL needs GPUs."""
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    device, timeout = RacingDevice(), _timeout()
    agreement, cpu = _agreement(ranks, timeout), torch.device("cpu")
    staging, check = DeviceStaging(device), timeout.board.check
    ordered_sum = OrderedSum(ranks, connect_gloo(members(ranks)), rank)
    summing = NcclSum(ordered_sum, agreement, cpu, device, staging, check, lambda _: None)
    summing.rehearse()
    summing.agree({"kind": (7, torch.float32)})
    found = []
    for number in range(sums):
        (total,) = summing.add("kind", torch.full((7,), float(rank + number))).wait()
        assert total is not None
        found.append(total.tolist())
    assert summing.join(30.0)
    dist.barrier()
    return found
