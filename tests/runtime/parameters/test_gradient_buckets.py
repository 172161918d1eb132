"""Gradients of replicas: summed in replica order, bit for bit, in buckets that leave while the backward runs."""

from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore

from penstock.errors import TransportError
from penstock.runtime.collectives.failures import FailureBoard
from penstock.runtime.collectives.store_gathers import StoreGather
from penstock.runtime.collectives.timeouts import Timeout
from penstock.runtime.devices.communicators import connect_gloo
from penstock.runtime.devices.staging import DeviceStaging
from penstock.runtime.parameters.gradient_buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES, GPU_BUCKET_BYTES, Reducer
from penstock.runtime.transport.nccl.all_reduce import NcclSum
from penstock.runtime.transport.ordered_all_reduce import Agreement, OrderedSum
from penstock.runtime.transport.transport import LoopbackTransport, PendingMessage, SumKind, SumKinds, Transport
from penstock.runtime.transport.worlds import join_world
from support.jobs.staging_jobs import members
from support.live_tensors import forget_what_is_there, live_tensors
from support.processes import Pool
from support.simulated import tardy_backend
from support.simulated.stream_races import RacingDevice, on_streams
from support.transport_selection import sharing_memory

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = ((), (3,), (2, 5), (1, 4, 2), (7,))
SIZES = {"one": 1, "whole": 1_000, "cut": 10_000, "cut unevenly": 10_001}
"""The number of float64 elements by kind. Tensors of more than 64 KiB are cut if there are more than two ranks."""


def summand_of(rank: int, count: int, dtype: torch.dtype = torch.float64, number: int = 0) -> Tensor:
    """What `rank` adds: numbers of very different sizes, so that the order of additions matters."""
    generator = torch.Generator().manual_seed(1_000 * number + rank)
    magnitudes = 10.0 ** torch.randint(-6, 7, (count,), dtype=torch.float64, generator=generator)
    return torch.randn(count, dtype=torch.float64, generator=generator).mul(magnitudes).to(dtype)


ROWS = [
    (count, dtype)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
    for count in (1, 7, 1_000, 40_000, 40_001)
]


def shares_of(count: int, ranks: int) -> tuple[int, ...]:
    """One of them is empty, if there are three or more."""
    return (count // 3, count - count // 3, *(0,) * (ranks - 2))


def add_rows(order: tuple[int, ...], backend: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Sums all rows over a communicator, in this order of the ranks: whole, this rank's share, and the shares that the
    ranks gather.
    """
    group = {"gloo": connect_gloo, "tardy": tardy_backend.connect}[backend](members(order))
    rank = dist.get_rank()
    add, sums = OrderedSum(order, group, rank), []
    for count, dtype in ROWS:
        own, shares = summand_of(rank, count, dtype), shares_of(count, len(order))
        share = add.of_kind(SumKind(count, dtype, shares), own)
        gathered = add.of_kind(SumKind(share.numel(), dtype, shares, gathers=True), share)
        sums.append((add(own), share, gathered))
    dist.barrier()
    return sums


@contextmanager
def _carried_by(backend: str) -> Iterator[None]:
    """Makes the CPU a device that sends by itself for the duration of a block, unless the backend is Gloo."""
    if backend == "gloo":
        yield
        return
    with sharing_memory(False), on_streams(RacingDevice(tardy=True)):
        yield


def replicate(backend: str, frozen: dict[int, str], bucket_bytes: int) -> tuple[str, list[float]]:
    """Sums gradients while some replicas do not train all parameters. Returns the error, if there is one, and one of
    the sums.

    `frozen`: by rank, the name of a parameter that it does not train.
    """
    group, rank = tuple(range(dist.get_world_size())), dist.get_rank()
    parameters = {name: nn.Parameter(torch.zeros(4 + index)) for index, name in enumerate("abc")}
    parameters.pop(frozen.get(rank, ""), None)
    with _carried_by(backend):
        transport, _ = _connect(group)
        try:
            reducer = Reducer(transport, group, rank, 0, parameters, bucket_bytes=bucket_bytes)
            before = tardy_backend.messages()
            reducer.arm(1)
            (torch.stack([parameter.sum() for parameter in parameters.values()]).sum() * rank).backward()
            # From device to device, no sum starts within the first backwards.
            assert tardy_backend.messages() == before
            assert all((parameter.grad is None) == (backend == "gloo") for parameter in parameters.values())
            reducer.start(1, {name: p.grad for name, p in parameters.items() if p.grad is not None})
            return "", reducer.finish(1)["a"].tolist()
        except TransportError as error:
            return str(error), []
        finally:
            transport.close()


def _connect(group: tuple[int, ...]) -> tuple[Transport, int]:
    return join_world().connect((), torch.device("cpu"), 30.0, (group,)), dist.get_rank()


def sum_all_kinds(group: tuple[int, ...]) -> list[Tensor]:
    """Three rounds of sums of every kind, with all sums of a round in flight at once. Returns nothing on ranks outside
    `group`.
    """
    transport, rank = _connect(group)
    sums = []
    if rank in group:
        transport.agree(group, rank, {kind: (size, torch.float64) for kind, size in SIZES.items()})
    for number in range(3 if rank in group else 0):
        own = {kind: summand_of(rank, size, number=number) for kind, size in SIZES.items()}
        receives = [transport.reduce(group, rank, kind, tensor) for kind, tensor in own.items()]
        for receive in receives:
            (total,) = receive.wait()
            assert total is not None and receive.ready()
            sums.append(total)
    transport.close()
    return sums


def sum_different_sizes() -> str:
    """The error message, if each rank adds a different number of elements."""
    group = tuple(range(dist.get_world_size()))
    transport, rank = _connect(group)
    try:
        transport.agree(group, rank, {"kind": (5 + rank, torch.float32)})
    except TransportError as error:
        return str(error)
    finally:
        transport.close()
    return "summed"


class Logged(LoopbackTransport):
    """Notes in `events` which rank gives what, as it happens."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> PendingMessage:
        self.events.append((rank, form, tensor.numel()))
        return super().reduce(group, rank, form, tensor)


@dataclass(frozen=True)
class Replica:
    """What one replica does before an update, by the numbers of its parameters."""

    before: frozenset[int]
    """Those that have gradients of earlier microbatches."""
    order: tuple[int, ...]
    """Those that the last backward makes a gradient for, in this order."""


@dataclass(frozen=True)
class Example:
    """Some replicas of a stage and two updates."""

    group: tuple[int, ...]
    specs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    late: frozenset[int]
    bucket_bytes: int
    armed: bool
    replicas: tuple[tuple[Replica, ...], ...]
    """By update and replica."""
    seed: int

    def fill(self, number: int) -> Tensor:
        """A gradient of parameter `number`, each time another one."""
        shape, dtype = self.specs[number]
        return torch.randn(shape, dtype=torch.float64).mul(10.0 ** torch.randint(-3, 4, ()).item()).to(dtype)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    """Two to four replicas, up to six parameters."""
    group = tuple(draw(st.permutations(range(draw(st.integers(2, 4))))))
    specs = draw(st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(DTYPES)), min_size=1, max_size=6))
    subsets = st.frozensets(st.integers(0, len(specs) - 1))
    orders = st.permutations(range(len(specs))).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda count: tuple(order[:count]))
    )
    replica = st.builds(Replica, subsets, orders)
    rounds = tuple(tuple(draw(replica) for _ in group) for _ in range(2))
    size = draw(st.sampled_from((1, 32, 100, 2**20)))
    return Example(group, tuple(specs), draw(subsets), size, draw(st.booleans()), rounds, draw(st.integers(0, 10**6)))


def backward(example: Example, replica: Replica, leaves: dict[str, nn.Parameter]) -> None:
    """Makes the gradients of the last microbatch, one parameter after the other."""
    for number in replica.order:
        leaf = leaves[f"p{number}"]
        torch.autograd.backward(leaf * 1.0, example.fill(number))


@settings(deadline=None, max_examples=60)
@given(examples())
def test_sums_are_those_of_adding_in_replica_order(example: Example) -> None:
    torch.manual_seed(example.seed)
    transport, late = Logged(), {f"p{number}" for number in example.late}
    parameters = {f"p{i}": nn.Parameter(torch.zeros(s, dtype=d)) for i, (s, d) in enumerate(example.specs)}
    reducers = {
        rank: Reducer(transport, example.group, rank, 0, parameters, late, example.bucket_bytes)
        for rank in example.group
    }
    expected: list[dict[str, Tensor]] = []
    for version, replicas in enumerate(example.replicas, 1):
        parts = []
        for rank, replica in zip(example.group, replicas, strict=True):
            for parameter in parameters.values():
                parameter.grad = None
            for number in replica.before:
                parameters[f"p{number}"].grad = example.fill(number)
            if example.armed:
                # What each parameter has in the end, kept from the reducer, which takes it away.
                plain = {name: nn.Parameter(leaf.detach().clone()) for name, leaf in parameters.items()}
                for name, leaf in parameters.items():
                    plain[name].grad = None if leaf.grad is None else leaf.grad.clone()
                state = torch.get_rng_state()
                backward(example, replica, plain)
                torch.set_rng_state(state)
                reducers[rank].arm(version)
                backward(example, replica, parameters)
                reducers[rank].disarm()
            else:
                backward(example, replica, parameters)
                plain = parameters
            own = {name: leaf.grad for name, leaf in parameters.items() if leaf.grad is not None}
            whole = {name: leaf.grad.clone() for name, leaf in plain.items() if leaf.grad is not None}
            # Gradients that other stages add come after the backward.
            for name in late & own.keys():
                extra = example.fill(int(name[1:]))
                own[name], whole[name] = own[name] + extra, whole[name] + extra
            reducers[rank].start(version, own)
            reducers[rank].start(version, {})
            parts.append(whole)
        names = {name for part in parts for name in part}
        expected.append({name: reduce(torch.add, [part[name] for part in parts if name in part]) for name in names})

    for version, sums in enumerate(expected, 1):
        for rank in example.group:
            assert reducers[rank].ready(version)
            found = reducers[rank].finish(version)
            assert found.keys() == sums.keys()
            for name, total in sums.items():
                assert found[name].dtype == total.dtype and torch.equal(found[name], total), (rank, name)
    # One order of buckets for all, whatever order the gradients were made in.
    sent = [[event[1:] for event in transport.events if event[0] == rank] for rank in example.group]
    assert all(forms == sent[0] for forms in sent)


@pytest.mark.parametrize("group", [(0, 1), (1, 0), (0, 1, 2), (2, 0, 1), (2, 0)], ids=str)
def test_processes_add_in_replica_order(pool: Pool, group: tuple[int, ...]) -> None:
    outcomes = pool.run(max(group) + 1, sum_all_kinds, group)
    expected, ascending = (
        [
            reduce(torch.add, [summand_of(rank, size, number=number) for rank in order])
            for number in range(3)
            for size in SIZES.values()
        ]
        for order in (group, sorted(group))
    )
    for rank in group:
        assert all(torch.equal(one, other) for one, other in zip(expected, outcomes[rank], strict=True))

    # The bits tell the orders of three apart, so that the above means something.
    distinguished = not all(torch.equal(one, other) for one, other in zip(expected, ascending, strict=True))
    assert distinguished == (group == (2, 0, 1))


@pytest.mark.parametrize("ranks", [2, 3])
def test_different_sizes_end_in_an_error_that_names_them(pool: Pool, ranks: int) -> None:
    reported = ", ".join(f"rank {rank}: (\"'kind'\", {5 + rank}, 'torch.float32')" for rank in range(ranks))
    for message in pool.run(ranks, sum_different_sizes):
        assert message == (
            f"the replicas on ranks {list(range(ranks))} sum different things ({reported}): expected the same "
            "parameters on all of them. Build the same model on every rank"
        )


def test_buckets_leave_before_the_backward_has_ended() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    transport = Logged()
    parameters = dict(model.named_parameters())
    reducer = Reducer(transport, (0, 1), 0, 0, parameters, bucket_bytes=2 * 16 * 4)
    for name, parameter in parameters.items():
        parameter.register_hook(lambda _, name=name: transport.events.append(name))
    reducer.arm(1)
    model(torch.randn(2, 4)).sum().backward()

    form = "gradients"
    assert transport.events == [
        *("4.weight", "3.weight", (0, (form, 0, 0), 34)),
        *("2.weight", "1.weight", (0, (form, 0, 1), 34)),
        *("0.weight", (0, (form, 0, 2), 17)),
    ]
    # What has left is not held twice.
    assert all(parameter.grad is None for parameter in parameters.values())


def test_live_tensors_are_constant_from_sum_to_sum() -> None:
    transport = LoopbackTransport()
    parameters = {str(index): nn.Parameter(torch.ones(4)) for index in range(5)}
    reducers = [Reducer(transport, (1, 0), rank, 0, parameters, bucket_bytes=40) for rank in range(2)]
    counts = []
    forget_what_is_there()
    for version in range(1, 6):
        for reducer in reducers:
            reducer.arm(version)
            torch.stack([parameter.sum() for parameter in parameters.values()]).sum().backward()
            reducer.disarm()
            reducer.start(version, {})
        for reducer in reducers:
            reducer.finish(version)
        counts.append(len(live_tensors()))

    assert len(set(counts)) == 1, counts


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", ["gloo", "tardy"])
@pytest.mark.parametrize("order", [(1, 0), (0, 1, 2), (2, 0, 1), (3, 0, 2, 1)], ids=str)
def test_backends_add_in_the_order_that_is_given(pool: Pool, order: tuple[int, ...], backend: str) -> None:
    expected = [reduce(torch.add, [summand_of(rank, *row) for rank in order]) for row in ROWS]
    for rank, found in enumerate(pool.run(len(order), add_rows, order, backend)):
        for (whole, share, gathered), total in zip(found, expected, strict=True):
            assert torch.equal(whole, total) and torch.equal(gathered, total)
            assert torch.equal(share, total.split(shares_of(len(total), len(order)))[order.index(rank)])


@pytest.mark.parametrize("backend", ["gloo", "tardy"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_that_train_the_same_agree(pool: Pool, ranks: int, backend: str) -> None:
    for message, found in pool.run(ranks, replicate, backend, {}, 20):
        assert message == "" and found == [float(sum(range(ranks)))] * 4


@pytest.mark.parametrize("backend", ["gloo", "tardy"])
@pytest.mark.parametrize("frozen", ["a", "c"])
def test_replicas_that_train_different_parameters_raise(pool: Pool, frozen: str, backend: str) -> None:
    """When they are made, before anything can hang."""
    form = repr(("gradients", 0, 0))
    whole, less = 4 + 5 + 6 + 3, {"a": 5 + 6 + 2, "c": 4 + 5 + 2}[frozen]
    for message, _ in pool.run(2, replicate, backend, {1: frozen}, 2**20):
        assert message == (
            f"the replicas on ranks [0, 1] sum different things (rank 0: {(form, whole, 'torch.float32')}, "
            f"rank 1: {(form, less, 'torch.float32')}): expected the same parameters on all of them. Build the same "
            "model on every rank"
        )


def test_a_replica_with_a_bucket_less_raises(pool: Pool) -> None:
    # The buckets of c and of b are the same; the first rank alone has one of a.
    for message, _ in pool.run(2, replicate, "gloo", {1: "a"}, 1):
        assert f"(rank 0: {(repr(('gradients', 0, 2)), 5, 'torch.float32')}, rank 1: nothing)" in message


def agreements(seconds: float, ranks: int = 2) -> tuple[list[Agreement], list[FailureBoard]]:
    """The agreements and boards of some ranks, which wait this long for each other."""
    store, order = HashStore(), range(ranks)
    boards = [FailureBoard(store, rank, ranks) for rank in order]
    gathers = [StoreGather("sums ", rank, order, Timeout(boards[rank], seconds)) for rank in order]
    return [Agreement(gather) for gather in gathers], boards


def test_who_agrees_with_a_rank_that_failed_raises_its_error() -> None:
    (mine, _), (_, board) = agreements(30.0)
    board.report("in a step", "ValueError: no more data", linger_seconds=0.0)

    with pytest.raises(TransportError, match=r"(?s)rank 1 failed in a step.*no more data"):
        mine.agree({"form": (3, torch.float32)})


def test_who_agrees_with_a_rank_that_says_nothing_names_it() -> None:
    (mine, _), _ = agreements(0.1)

    with pytest.raises(TransportError, match=r"nothing came from rank 1 for 0.1 s \(the sum over ranks \[0, 1\]\)"):
        mine.agree({"form": (3, torch.float32)})


class DistantWork:
    """The device will come to its end some time."""

    def wait(self) -> None:
        """Nothing on the host waits."""


class DistantGroup:
    """NCCL between ranks of which the others have not come to anything yet. Notes what it is called with."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.reported: list[tuple[str, int, torch.dtype]] = []

    def send(self, tensors: list[Tensor], *_: int) -> None:
        self.reported.append(("send", tensors[0].numel(), tensors[0].dtype))

    def recv(self, tensors: list[Tensor], *_: int) -> None:
        self.reported.append(("recv", tensors[0].numel(), tensors[0].dtype))

    def _allgather_base(self, every: Tensor, own: Tensor) -> DistantWork:
        self.reported.append(("allgather", own.numel(), own.dtype))
        return DistantWork()

    def alltoall_base(self, received: Tensor, sent: Tensor, *_: list[int]) -> DistantWork:
        self.reported.append(("alltoall", sent.numel(), sent.dtype))
        return DistantWork()

    def _start_coalescing(self) -> None:
        """What follows is one operation."""

    def _end_coalescing(self) -> DistantWork:
        return DistantWork()


class Directly(LoopbackTransport):
    """One rank's end of sums over NCCL."""

    def __init__(self, end: NcclSum) -> None:
        super().__init__()
        self._end = end

    def agree(self, group: tuple[int, ...], rank: int, forms: SumKinds) -> None:
        self._end.agree(forms)

    def reduce(self, group: tuple[int, ...], rank: int, form: Hashable, tensor: Tensor) -> PendingMessage:
        return self._end.add(form, tensor)


def distant_end(rank: int, agreement: Agreement, group: DistantGroup, ranks: int = 2) -> NcclSum:
    """The one of `rank`, of this number of ranks."""
    device = RacingDevice()
    staging, cpu = DeviceStaging(device), torch.device("cpu")
    return NcclSum(OrderedSum(range(ranks), group, rank), agreement, cpu, device, staging, lambda: None, lambda _: None)


def test_a_backward_waits_for_no_other_replica() -> None:
    """It makes the gradient of the stage's input, which the other replica's last microbatch may depend on."""
    parameters = {name: nn.Parameter(torch.ones(4)) for name in ("a", "b")}
    x = torch.ones(4, requires_grad=True)

    def make(rank: int, agreement: Agreement) -> Reducer:
        return Reducer(
            Directly(distant_end(rank, agreement, DistantGroup())), (0, 1), rank, 0, parameters, bucket_bytes=1
        )

    both, _ = agreements(1.0)
    with ThreadPoolExecutor(2) as threads:
        reducers = list(threads.map(make, range(2), both))
    reducers[0].arm(1)
    # The other one has not begun its last backward.
    torch.stack([x * parameter for parameter in parameters.values()]).sum().backward()

    assert x.grad is not None and all(parameter.grad is None for parameter in parameters.values())


def test_what_has_not_been_agreed_on_is_not_added() -> None:
    both, _ = agreements(1.0)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda agreement: agreement.agree({"form": (3, torch.float32)}), both))
    end = distant_end(0, both[0], DistantGroup())
    end.add("form", torch.zeros(3))

    with pytest.raises(TransportError, match=r"rank 0 adds 4 numbers of torch.float32, and .* agreed on 3 numbers"):
        end.add("form", torch.zeros(4))
    with pytest.raises(TransportError, match="agreed on nothing"):
        end.add("another form", torch.zeros(3))


FORMS: dict[str, tuple[int, torch.dtype] | SumKind] = {
    "small": (3, torch.float32),
    "large": (99_999, torch.float32),
    "of another type": (30_000, torch.float64),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_training_asks_nccl_for_nothing_that_it_has_not_done_before(ranks: int) -> None:
    """It connects ranks at the first need, and its host waits for them all."""
    groups = [DistantGroup() for _ in range(ranks)]
    both, _ = agreements(1.0, ranks)

    def prepare(rank: int) -> NcclSum:
        end = distant_end(rank, both[rank], groups[rank], ranks)
        end.rehearse()
        # For whatever is added, as soon as there are communicators.
        operations = {"send", "recv"} if ranks == 2 else {"allgather", "alltoall"}
        assert {name for name, *_ in groups[rank].reported} == operations
        end.agree(FORMS)
        return end

    with ThreadPoolExecutor(ranks) as threads:
        ends = list(threads.map(prepare, range(ranks)))
    for end, group in zip(ends, groups, strict=True):
        before = list(group.reported)
        for form, (numbers, dtype, *_) in FORMS.items():
            end.add(form, torch.zeros(numbers, dtype=dtype))
        now = group.reported[len(before) :]

        assert now and set(now) <= set(before)


class Listening(LoopbackTransport):
    """Notes what is agreed on."""

    def __init__(self) -> None:
        super().__init__()
        self.forms: list[tuple[int, torch.dtype] | SumKind] = []

    def agree(self, group: tuple[int, ...], rank: int, forms: SumKinds) -> None:
        self.forms = list(forms.values())


@pytest.mark.parametrize(("device", "largest"), [("cpu", BUCKET_BYTES), ("meta", GPU_BUCKET_BYTES)])
def test_buckets_are_larger_on_devices_of_their_own(device: str, largest: int) -> None:
    """The meta device stands for a GPU."""
    parameters = {str(index): nn.Parameter(torch.empty(2**18, device=device)) for index in range(100)}
    transport = Listening()
    Reducer(transport, (0, 1), 0, 0, parameters)
    # A parameter has 1 MiB, and one number more that says whether it is there.
    first, *others, last = [numbers // 2**18 for numbers, *_ in transport.forms]

    assert first * 2**20 == FIRST_BUCKET_BYTES
    assert {other * 2**20 for other in others} == {largest}
    assert first + sum(others) + last == 100


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_what_is_cut_among_ranks_can_be_cut_evenly(ranks: int) -> None:
    """Makes a second copy unnecessary."""
    parameters = {str(index): nn.Parameter(torch.zeros(1 + 7 * index)) for index in range(9)}
    transport = Listening()
    Reducer(transport, tuple(range(ranks)), 0, 0, parameters, bucket_bytes=100)
    least = sum(parameter.numel() for parameter in parameters.values()) + len(parameters)
    sent = [numbers for numbers, *_ in transport.forms]

    assert ranks == 2 or all(numbers % ranks == 0 for numbers in sent)
    assert least <= sum(sent) < least + (1 if ranks == 2 else ranks * len(sent))
