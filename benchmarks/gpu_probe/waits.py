"""Whether a call of the host waits for another stream: ``python benchmarks/gpu_probe/waits.py CALL --found FILE``.

A receive of NCCL is a kernel that spins until its sender sends. If the host waits for it before it has queued what the
sender waits for, both stop. So here one stream spins, the call is made on another, and the question is whether the
spin is over when the call returns. Each call must be the first of its kind in its process, since what waits is often
CUDA that loads a kernel; the caller sets CUDA_MODULE_LOADING.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import nn

from gpu_probe.probe import Notes, Spinner, new_stream, parser_of
from gpu_run.parts import WAITING

__all__ = ["CALLS", "verdict"]

Call = Callable[[], object]
AHEAD_SECONDS = 0.02
"""The spin has begun by then."""
SPIN_SECONDS = 1.0
LONG = {"torch.compile": 12.0, "communicator": 4.0, "triton kernel": 2.0, "backward": 2.0}
"""The spin must take much longer than the call takes by itself."""


def _synchronize() -> Call:
    return torch.cuda.synchronize


def _matmul() -> Call:
    left = torch.ones(96, 96, device="cuda")
    return lambda: left @ left


def _matmul_of_another_type() -> Call:
    known = torch.ones(64, 64, device="cuda")
    other = torch.ones(512, 768, device="cuda", dtype=torch.bfloat16)
    known @ known
    return lambda: other @ other.T


def _backward() -> Call:
    """The first of the process: autograd starts its thread, which makes a handle of cuBLAS for itself."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).cuda()
    loss = nn.functional.cross_entropy(
        model(torch.ones(16, 64, device="cuda")), torch.zeros(16, dtype=torch.long, device="cuda")
    )
    return loss.backward


def _elementwise() -> Call:
    numbers = torch.ones(1000, device="cuda")
    return lambda: torch.atan(numbers)


def _adamw(fused: bool) -> Call:
    # The first optimizer of a process imports much; that one is on the host.
    on_host = nn.Linear(2, 2)
    on_host.weight.grad = torch.ones_like(on_host.weight)
    torch.optim.AdamW([on_host.weight]).step()
    parameters = [nn.Parameter(torch.ones(64, 64, device="cuda")) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=fused, foreach=not fused)
    return optimizer.step


def _cuda_malloc() -> Call:
    return lambda: torch.empty(1 << 30, dtype=torch.uint8, device="cuda")


def _empty_cache() -> Call:
    torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    return torch.cuda.empty_cache


def _pinned_memory() -> Call:
    return lambda: torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)


def _event() -> Call:
    return lambda: torch.cuda.Event(enable_timing=True).record()


def _item() -> Call:
    number = torch.ones((), device="cuda")
    number.item()
    return number.item


def _copy() -> Call:
    numbers = torch.ones(1 << 20)
    return lambda: numbers.to("cuda")


def _recorder() -> tuple[torch.cuda.CUDAGraph, Call]:
    """A graph of one kernel that has run before, and what captures it without instantiating it."""
    numbers = torch.ones(1000, device="cuda")
    numbers.mul_(1.5)
    graph = torch.cuda.CUDAGraph(keep_graph=True)

    def capture() -> None:
        graph.capture_begin(capture_error_mode="thread_local")
        numbers.mul_(1.5)
        graph.capture_end()

    return graph, capture


def _graph_capture() -> Call:
    return _recorder()[1]


def _graph_instantiation() -> Call:
    graph, capture = _recorder()
    capture()
    return graph.instantiate


def _graph_replay() -> Call:
    graph, capture = _recorder()
    capture()
    graph.instantiate()
    return graph.replay


def _triton_kernel() -> Call:
    """Compiled before, so that only its loading and its launch are left."""
    from gpu_probe.triton_kernel import add_one

    numbers = torch.ones(1000, device="cuda")
    add_one.warmup(numbers, 1000, BLOCK=1024, grid=(1,))
    return lambda: add_one[(1,)](numbers, 1000, BLOCK=1024)


def _compile() -> Call:
    """The second function that is compiled: the first one imports the compiler."""
    numbers = torch.ones(1000, device="cuda")
    torch.compile(lambda x: torch.sin(x) * 2)(numbers)
    second = torch.compile(lambda x: torch.cos(x) + 3)
    return lambda: second(numbers)


def _communicator() -> Call:
    """Makes a communicator of one rank: it needs no peer, and takes memory and loads kernels as any other."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=60)
    options.config.max_ctas = 2
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    device = torch.device("cuda", 0)
    return lambda: group.eager_connect_single_device(device)


MAKERS: tuple[Callable[[], Call], ...] = (
    _synchronize,
    _matmul,
    _matmul_of_another_type,
    _backward,
    _elementwise,
    lambda: _adamw(fused=True),
    lambda: _adamw(fused=False),
    _cuda_malloc,
    _empty_cache,
    _pinned_memory,
    lambda: new_stream,
    _event,
    _item,
    _copy,
    _graph_capture,
    _graph_instantiation,
    _graph_replay,
    _triton_kernel,
    _compile,
    _communicator,
)
CALLS = dict(zip(WAITING, MAKERS, strict=True))
"""What prepares each of them on the current stream, and returns it."""


def verdict(call_seconds: float, spin_seconds: float, was_over: bool) -> str:
    """Whether the call waited. "no": it returned while the device was spinning. "yes": it returned soon after the end.
    A call that took twice as long as the spin may have been busy by itself: "unknown".
    """
    if not was_over:
        return "no"
    return "yes" if call_seconds < 2 * spin_seconds else "unknown"


def main() -> None:
    # Compiles in this process, so that there is no other process to wait for.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # No stream shall be held up for the sake of a hardware queue: that is another question.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    options = parser_of(__doc__, WAITING).parse_args()
    notes = Notes(options.found)
    torch.cuda.set_device(0)
    spinner, spinning, calling = Spinner(), torch.cuda.Stream(), torch.cuda.Stream()
    seconds = LONG.get(options.name, SPIN_SECONDS)
    with torch.cuda.stream(calling):
        call = CALLS[options.name]()
        torch.cuda.synchronize()
        asked = time.perf_counter()
        over = spinner.spin(spinning, seconds)
        time.sleep(AHEAD_SECONDS)
        begun = time.perf_counter()
        # What it returns is dropped afterwards: to free it may wait, too.
        kept = call()
        returned = time.perf_counter()
        was_over = over.query()
    torch.cuda.synchronize()
    spun = time.perf_counter() - asked
    notes.add(
        "wait",
        name=options.name,
        loading=os.environ.get("CUDA_MODULE_LOADING", ""),
        call_seconds=round(returned - begun, 4),
        spin_seconds=seconds,
        all_seconds=round(spun, 4),
        waits=verdict(returned - begun, seconds, was_over),
    )
    del kept


if __name__ == "__main__":
    main()
