"""What autograd saved leaves the memory and comes back: the same bits, once each, and nothing that others hold."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.runtime.devices.host_stores import HOST, MemoryStore, make_host_store
from penstock.runtime.devices.staging import HostStaging
from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.offloading import Offloads

SIZE = 64


class Block(nn.Module):
    """Saves one tensor twice, views of one storage, a mask, a buffer, weights and views of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm = nn.BatchNorm1d(SIZE)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        left, right = (hidden * hidden).exp().chunk(2, dim=1)
        joined = torch.cat([left.sin() * right.t().contiguous().t(), right * left], dim=1)
        return self.norm(nn.functional.dropout(self.second(joined), 0.3)).relu()


class Watched(MemoryStore):
    """Notes the bytes of every tensor that is put."""

    def __init__(self) -> None:
        super().__init__(HostStaging())
        self.sizes: list[int] = []

    def put(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
        self.sizes += [tensor.numel() for tensor in tensors]
        return super().put(tensors)


@pytest.fixture(params=["host", "directory"])
def offloads(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Offloads]:
    store = make_host_store(HOST if request.param == "host" else tmp_path, HostStaging())
    yield Offloads(store)
    store.close()


def run(compute: Callable[..., Tensor], x: Tensor, offloads: Offloads | None) -> Tensor:
    """The gradient of `x`, of one microbatch whose saved tensors leave and come back if there are `offloads`."""
    executor = StageExecutor()
    (output,) = executor.forward(0, (x,), lambda received: (compute(*received),), offloads=offloads)
    if offloads is not None:
        executor.saved_tensors(0).offload(2)
        offloads.begin_computation()
        offloads.begin_computation()
        executor.saved_tensors(0).reload()
    (gradient,) = executor.backward(0, (torch.ones_like(output),))
    assert gradient is not None
    return gradient


def received(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(8, SIZE, dtype=torch.float64).requires_grad_()


def block() -> Block:
    torch.manual_seed(1)
    return Block().double()


def test_the_bits_are_those_without(offloads: Offloads) -> None:
    plain, moved = block(), block()
    expected = run(plain, received(), None)

    assert torch.equal(run(moved, received(), offloads), expected)
    for one, other in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_several_microbatches_have_slots_of_their_own(offloads: Offloads) -> None:
    """Slots are used again, and never before the copy back has ended."""
    model, executor, outputs, expected = block(), StageExecutor(), {}, []
    for k in range(4):
        expected.append(run(block(), received(k), None))
    for turn in range(6):
        if turn < 4:
            offloads.begin_computation()
            torch.manual_seed(turn)
            x = torch.randn(8, SIZE, dtype=torch.float64).requires_grad_()
            (outputs[turn],) = executor.forward(turn, (x,), lambda received: (model(*received),), offloads=offloads)
            executor.saved_tensors(turn).offload(2)
        if (due := turn - 1) in range(4):
            executor.saved_tensors(due).reload()
        if (due := turn - 2) in range(4):
            (gradient,) = executor.backward(due, (torch.ones_like(outputs[due]),))
            assert torch.equal(gradient, expected[due])  # type: ignore[arg-type]


ROW = 8 * SIZE * 8
"""The bytes of one activation."""
HELD: dict[str, tuple[Callable[[Block], Callable[[Tensor], Tensor]], list[int]]] = {
    "a tensor that is saved twice": (lambda _: lambda x: (y := x.exp()) * y + y.sin(), [ROW]),
    "views of one storage": (lambda _: lambda x: (y := x.exp())[:, :3].sin().sum() + y.t().cos().sum(), [ROW]),
    "a parameter, and the view of it": (lambda block: lambda x: block.first(x.sin()), [ROW]),
    "a product, and no conjugate": (
        lambda _: lambda x: ((y := torch.view_as_complex(x.exp().view(8, -1, 2))).conj() * y).abs(),
        [ROW],
    ),
    "a buffer": (lambda block: lambda x: x * block.norm.running_mean, []),
    "what was received": (lambda _: lambda x: x.sin(), []),
    "an output": (lambda _: lambda x: x.exp(), []),
    "what a module keeps": (lambda block: lambda x: keep(block, x.exp()).sin(), []),
    "what a module keeps a view of": (lambda block: lambda x: keep(block, (y := x.exp())[2:]).sum() + y.sin(), []),
}


def keep(block: Block, value: Tensor) -> Tensor:
    block.cache = value.detach()
    return value


@pytest.mark.parametrize("name", HELD)
def test_only_what_nothing_else_holds_is_moved_and_each_storage_once(name: str) -> None:
    make, expected = HELD[name]
    store = Watched()
    found = run(make(block()), received(), Offloads(store))

    assert store.sizes == expected
    assert torch.equal(found, run(make(block()), received(), None))


def test_tensors_on_other_devices_stay() -> None:
    """A GPU's stages may save small tensors of the CPU, which would come back to the GPU."""
    store = Watched()
    run(block(), received(), Offloads(store, torch.device("cuda")))

    assert store.sizes == []


def test_what_two_microbatches_share_is_moved_by_neither() -> None:
    store, executor, shared = Watched(), StageExecutor(), []
    offloads = Offloads(store)

    def compute(given: Sequence[Tensor]) -> tuple[Tensor]:
        if not shared:
            shared.append(given[0].detach().exp())
        return (given[0] * shared[0],)

    for k in range(2):
        executor.forward(k, (received(),), compute, offloads=offloads)
    shared.clear()
    for k in range(2):
        executor.saved_tensors(k).offload(2)

    assert store.sizes == []


class Views(torch.autograd.Function):
    """Saves views of one storage: with gaps, expanded, of another type, and complex ones."""

    seen: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        memory = x.detach().clone()
        pairs = torch.view_as_complex(memory.view(8, SIZE // 2, 2))
        ctx.save_for_backward(memory[1::2, ::3].t(), memory[:1].expand(5, SIZE), memory.view(torch.int32), pairs)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        Views.seen = ctx.saved_tensors
        return gradients[0].expand(8, SIZE)


def test_views_come_back_as_they_were(offloads: Offloads) -> None:
    run(Views.apply, received(), None)
    expected = Views.seen
    run(Views.apply, received(), offloads)

    for one, other in zip(expected, Views.seen, strict=True):
        assert (one.shape, one.stride(), one.dtype, one.storage_offset()) == (
            *(other.shape, other.stride()),
            *(other.dtype, other.storage_offset()),
        )
        assert torch.equal(one, other)


def write(block: Block, executor: StageExecutor, *, first: bool, lets_go: bool) -> None:
    for step in (True, False):
        if step is not first:
            executor.saved_tensors(0).offload(2)
            continue
        assert block.cache is not None
        block.cache.add_(1)
        if lets_go:
            block.cache = None


@pytest.mark.parametrize(("first", "lets_go"), [(True, False), (True, True), (False, False)])
def test_a_write_after_the_forward_is_autograds_error(*, first: bool, lets_go: bool) -> None:
    """Before the offload, by a module that may keep the tensor no longer, or while it is offloaded."""
    model, executor, offloads = block(), StageExecutor(), Offloads(Watched())

    def compute(given: Sequence[Tensor]) -> tuple[Tensor]:
        hidden = given[0].exp()
        keep(model, hidden)
        return (hidden.sin(),)

    (output,) = executor.forward(0, (received(),), compute, offloads=offloads)
    write(model, executor, first=first, lets_go=lets_go)
    executor.saved_tensors(0).reload()

    with pytest.raises(PenstockError, match=r"after its forward: one of the variables.*is at version 1"):
        executor.backward(0, (torch.ones_like(output),))


def test_a_write_in_the_backward_is_seen_by_the_other_views(offloads: Offloads) -> None:
    for chosen in (None, offloads):
        with pytest.raises(PenstockError, match="modified by an inplace operation"):
            run(write_and_read, received(), chosen)


def write_and_read(x: Tensor) -> Tensor:
    y = x.exp()
    return y.sin() + Writes.apply(y)


class Writes(torch.autograd.Function):
    """Its backward, which is the first, writes what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        ctx.saved_tensors[0].zero_()
        return gradients[0]


def test_a_backward_without_a_reload_is_an_error(offloads: Offloads) -> None:
    executor = StageExecutor()
    (output,) = executor.forward(0, (received(),), lambda given: (given[0].exp().sin(),), offloads=offloads)
    executor.saved_tensors(0).offload(2)

    with pytest.raises(PenstockError, match="reads a tensor that is offloaded: expected that its microbatch is rel"):
        executor.backward(0, (torch.ones_like(output),))


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def test_a_directory_frees_the_memory(tmp_path: Path) -> None:
    offloads, executor = Offloads(make_host_store(tmp_path, HostStaging())), StageExecutor()
    # The C library gives back at once what takes more than 32 MB, whatever the process did before.
    x = torch.ones(1 << 24, requires_grad=True)
    before = resident()
    (output,) = executor.forward(0, (x,), lambda given: (given[0].exp().sin().cos().sum(),), offloads=offloads)
    held = resident()
    executor.saved_tensors(0).offload(2)
    offloads.begin_computation()
    offloads.begin_computation()
    after = resident()
    executor.saved_tensors(0).reload()
    executor.backward(0, (torch.ones_like(output),))

    assert held - before > 120e6
    assert after - before < 20e6, "two activations of 64 MB are in the file"
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    offloads.store.close()


def test_a_full_disk_is_an_error_that_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    monkeypatch.setattr(os, "pwrite", refuse)
    offloads, executor = Offloads(make_host_store(tmp_path, HostStaging())), StageExecutor()
    with pytest.raises(PenstockError, match=f"offload_to='{tmp_path}': expected room for 48 bytes there, found"):
        offloads.store.memory((torch.Size((6,)), (1,), torch.float64))
    executor.forward(0, (received(),), lambda given: (given[0].exp().sin(),), offloads=offloads)
    with pytest.raises(PenstockError, match=f"offload_to='{tmp_path}': expected room for \\d+ bytes there, found"):
        executor.saved_tensors(0).offload(2)
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", refuse)
    executor.forward(1, (received(),), lambda given: (given[0].exp().sin(),), offloads=offloads)
    executor.saved_tensors(1).offload(2)
    with pytest.raises(PenstockError, match=f"offload_to='{tmp_path}': expected room for \\d+ bytes there, found"):
        executor.saved_tensors(1).reload()
    offloads.store.close()


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"expected a directory that this process can write in.*No such file"):
        make_host_store(tmp_path / "none", HostStaging())


def test_a_file_grows_no_more_when_its_slots_are_free(tmp_path: Path) -> None:
    offloads, executor, sizes = Offloads(make_host_store(tmp_path, HostStaging())), StageExecutor(), []
    for k in range(3):
        (output,) = executor.forward(k, (received(),), lambda given: (given[0].exp().sin(),), offloads=offloads)
        executor.saved_tensors(k).offload(2)
        executor.saved_tensors(k).reload()
        executor.backward(k, (torch.ones_like(output),))
        sizes.append(os.fstat(offloads.store._file.fileno()).st_size)  # type: ignore[attr-defined]

    assert sizes == [sizes[0]] * 3 and sizes[0] > 0
    offloads.store.close()
