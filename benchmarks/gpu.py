"""Times Penstock on one or several GPUs, beside a plain loop, DDP and torch's schedules, and prints one table.

    python benchmarks/gpu.py

The first launch is one process on one card: the plain loop, Penstock with one stage, and Penstock with all stages in
the process. If there are more cards, the second launch has a process on each, over NCCL. The script starts its
processes itself. A contender that fails, dies or hangs becomes a row with the reason, and new processes go on with the
next one. Not all contenders fit on a card at once, so each is built alone and takes turns with a plain loop that stays
on the first card. What slows the device down slows both: only their ratio, round by round, can be compared.
"""

import argparse
import gc
import os
import re
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

import penstock
from contenders.contenders import GLOO, Absent, Entry, Running, data_parallel, one_stage, penstock_entries, plain_loop
from contenders.jobs import Language, Placed, Setting
from contenders.torch_contenders import torch_entries
from measurement.crews import Crew, Failed
from measurement.ideals import speedup
from measurement.reports import conditions
from penstock.reporting.stats import peak_flops_of
from penstock.runtime.transport.backend_selection import SHARED_MEMORY

META = torch.device("meta")
STAGES = 2
"""The number of stages in the launch of one process; `interleaved` has twice as many."""
IN_ONE_PROCESS = ("penstock gpipe", "penstock 1f1b-flush", "penstock interleaved", "penstock 2bw")
ROUNDS = 3
LEGEND = f"""\
procs: processes, one on each device; the first launch has all {STAGES} stages in one. ready: seconds to build it and to
take the first steps, which are in no other column. plain: how many times as fast as the plain loop on one device that
takes turns with it, the median of {ROUNDS} rounds; least, most: of the rounds. The row of the plain loop is a second
one: its least and most say what a difference is worth. MFU: the model's operations per second over the peak rate of all
devices. peak, reserved: GB on the device with the most, beyond the plain loop that stays: of tensors, and of all that
the allocator has taken. In several processes each holds the initial weights of the whole model, too. loss: of the first
step, the same but for rounding in all rows; but pipedream updates within the step, and DDP does not tell."""


@dataclass(frozen=True, slots=True)
class Size:
    """A GPT of examples/train_gpt.py, and the minibatches that it is trained on."""

    model: Language
    samples: int
    """In a microbatch."""
    microbatches: int
    """In a step, for each rank."""

    @property
    def parameters(self) -> int:
        """The number of trained numbers."""
        with META:
            return sum(parameter.numel() for parameter in self.model.build().parameters())


SIZES = {
    # Figure 4.7 of [Narayanan 2021]: 16 samples a step in microbatches of 1, with which only the plain loop runs, to 8.
    **{f"gpt-820m-b{b}": Size(Language(4096, heads=128, blocks=4, context=2048), b, 8 // b) for b in (1, 2, 4, 8)},
    "gpt-350m": Size(Language(width=1024, heads=16, blocks=28, context=1024), 4, 4),
    "gpt-620m": Size(Language(width=2048, heads=16, blocks=12, context=1024), 8, 4),
    "gpt-85m": Size(Language(width=768, heads=12, blocks=12, context=1024), 4, 4),
    "nano": Size(Language(width=16, heads=2, blocks=4, context=8), 2, 2),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes that share one process group, and the training that all contenders in them do."""

    gpu: bool
    processes: int
    size: Size
    seconds: float
    """Of the turns of all contenders."""
    limit_seconds: float
    """Of one contender, with the start of the processes before the first one."""

    def setting(self, device: torch.device) -> Setting:
        """Weights of float32, autocast to bfloat16, and AdamW in one kernel, as in a usual training on a GPU."""
        ranks = max(STAGES, self.processes)
        placed, microbatches = Placed(self.size.model, device, self.size.samples), self.size.microbatches * ranks
        return Setting(placed, ranks, microbatches, optimizer=adamw, autocast=torch.bfloat16)

    def entries(self) -> dict[str, Entry | Absent]:
        """The contenders by name, in the order of the table."""
        setting = self.setting(META)
        ours = [one for one in penstock_entries(setting) if not one.name.endswith(GLOO)]
        if self.processes > 1:
            every = [data_parallel(setting), *torch_entries(setting), *ours]
        else:
            loop = replace(plain_loop(), name="plain loop")
            every = [loop, one_stage(), *(one for one in ours if one.name in IN_ONE_PROCESS)]
        return {one.name: one for one in every}

    def tokens(self) -> int:
        """The tokens of a step."""
        return self.setting(META).microbatches * self.size.samples * self.size.model.context

    def flops(self) -> float:
        """The model's operations in a step: 6 N + 12 L H T for a token, as in appendix B of PaLM (Chowdhery et al.,
        JMLR 2023). Attention counts as if it were not causal.
        """
        model = self.size.model
        return self.tokens() * (6 * self.size.parameters + 12 * model.blocks * model.width * model.context)


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


@dataclass(frozen=True, slots=True)
class Taken:
    """The measurements of one contender in one process. Seconds are those of a step, one number for each round."""

    ready_seconds: float
    seconds: list[float]
    plain_seconds: list[float]
    loss: float | None
    """The loss of the first step; None where this process does not know it."""
    peak_bytes: tuple[int, int]
    """Of tensors, and of all that the allocator has taken; 0 on a CPU, whose memory PyTorch does not count."""
    peak_flops: float
    """The rate of the device in operations per second."""


IDLE = Running(lambda: [], {})
"""What processes other than the first one do in the turns of the plain loop."""


class Bench:
    """One process of a launch."""

    def __init__(self, rank: int, launch: Launch, port: int) -> None:
        torch.set_num_threads(1)
        # On a CPU the processes are to send as between hosts, and not through shared memory, which no GPU uses.
        os.environ.update({"LOCAL_RANK": str(rank), SHARED_MEMORY: "0"})
        self._gpu = launch.gpu
        self._device = penstock.local_device() if launch.gpu else torch.device("cpu")
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if launch.gpu else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=launch.processes)
        # Barriers of NCCL would be work on the device.
        self._group = dist.new_group(backend="gloo")
        self._setting, self._entries = launch.setting(self._device), launch.entries()
        self._turn_seconds = launch.seconds / len(self._entries) / (2 * ROUNDS)
        self._peak_flops = peak_flops_of(self._device) or self._matrix_flops()
        self._plain = plain_loop().build(self._setting) if rank == 0 else IDLE
        # Over NCCL the first steps of Penstock, two more than there are processes, wait for messages on the host.
        self._warm_up_steps = launch.processes + 3
        self._take_turn(self._plain, self._warm_up_steps)
        self._plain_steps = self._steps_of_a_turn(self._plain)

    def __call__(self, name: str) -> Taken:
        """Builds the contender of that name, and measures it in turns with the plain loop."""
        entry = self._entries[name]
        assert isinstance(entry, Entry)
        gc.collect()
        if self._gpu:
            torch.cuda.empty_cache()
        before = self._memory("current")
        start = time.perf_counter()
        running = entry.build(self._setting)
        losses = [[float(loss) for loss in running.step()] for _ in range(self._warm_up_steps)]
        self._finish(running)
        ready = time.perf_counter() - start
        if self._gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        steps = self._steps_of_a_turn(running)
        peak = self._memory("peak")
        own: list[float] = []
        plain: list[float] = []
        turns = [(own, running, steps), (plain, self._plain, self._plain_steps)]
        for number in range(ROUNDS):
            # Neither always follows the other.
            for seconds, one, count in turns[:: -1 if number % 2 else 1]:
                seconds.append(self._take_turn(one, count))
        running.close()
        loss = statistics.fmean(losses[0]) if losses[0] else None
        return Taken(ready, own, plain, loss, (peak[0] - before[0], peak[1] - before[1]), self._peak_flops)

    def _take_turn(self, running: Running, steps: int) -> float:
        """Seconds of a step until all devices have finished. Collective."""
        dist.barrier(self._group)
        start = time.perf_counter()
        for _ in range(steps):
            running.step()
        self._finish(running)
        dist.barrier(self._group)
        return (time.perf_counter() - start) / steps

    def _finish(self, running: Running) -> None:
        """Waits for the device. Under 2bw and pipedream it may wait for messages of the next step, so the pipeline is
        drained before.
        """
        if running.pipe is not None:
            running.pipe.drain()
        if self._gpu:
            torch.cuda.synchronize(self._device)

    def _steps_of_a_turn(self, running: Running) -> int:
        """The number of steps that fill a turn, by two that are measured; the same in all processes. Collective."""
        found = [max(1, round(self._turn_seconds / self._take_turn(running, 2)))]
        dist.broadcast_object_list(found, 0, self._group)
        return found[0]

    def _memory(self, when: str) -> tuple[int, int]:
        """Bytes of tensors and of all that the allocator has taken; `when` is current or peak."""
        if not self._gpu:
            return 0, 0
        counts = torch.cuda.memory_stats(self._device)
        return counts.get(f"allocated_bytes.all.{when}", 0), counts.get(f"reserved_bytes.all.{when}", 0)

    def _matrix_flops(self) -> float:
        """The rate of large products in bfloat16, for a device whose data sheet is not known."""
        size = 8192 if self._gpu else 256
        left, right = torch.randn(2, size, size, device=self._device).bfloat16()
        products = Running(lambda: [(left @ right)[0, 0]], {})
        self._take_turn(products, 50)
        return 2 * size**3 / self._take_turn(products, 50)


def lines_of(launch: Launch, only: re.Pattern[str]) -> Iterator[str]:
    """The rows of `launch`, each as soon as it is known."""
    crew = None
    for name, entry in launch.entries().items():
        if not only.search(name):
            continue
        start = f"{name:24}{launch.processes:>6}"
        if isinstance(entry, Absent):
            yield f"{start}  left out: {entry.reason}"
            continue
        try:
            if crew is None:
                # The store outlives processes that fail; those that follow them need a new one.
                store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                crew = Crew(launch.processes, Bench, (launch, store.port), launch.limit_seconds, launch.gpu)
            yield start + figures(launch, crew.ask(name))
        except Failed as failure:
            yield f"{start}  failed: {failure}"
            if crew is not None:
                crew.close()
                crew = None
    if crew is not None:
        crew.close()


HEAD = (
    f"{'':24}{'procs':>6}{'ready s':>9}{'ms/step':>10}{'tokens/s':>11}{'plain':>8}{'least':>7}{'most':>7}{'MFU':>7}"
    f"{'peak GB':>9}{'reserved':>9}{'loss':>9}"
)


def figures(launch: Launch, taken: Sequence[Taken]) -> str:
    """The columns of a row. `taken`: by process."""
    own, plain = taken[0].seconds, taken[0].plain_seconds
    ratios = [other / seconds for other, seconds in zip(plain, own, strict=True)]
    seconds, rate = statistics.median(own), sum(one.peak_flops for one in taken)
    memory = [max(counts) / 1e9 for counts in zip(*(one.peak_bytes for one in taken), strict=True)]
    loss = next((one.loss for one in taken if one.loss is not None), None)
    return (
        f"{max(one.ready_seconds for one in taken):9.1f}{1e3 * seconds:10.2f}{launch.tokens() / seconds:11,.0f}"
        f"{speedup(plain, own):7.3f}x{min(ratios):7.3f}{max(ratios):7.3f}{launch.flops() / seconds / rate:7.1%}"
        + "".join(f"{gigabytes:9.2f}" if launch.gpu else f"{'-':>9}" for gigabytes in memory)
        + f"{'-' if loss is None else f'{loss:.4f}':>9}"
    )


def cards() -> str:
    """The names of the cards and the version of the driver, by nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        reported = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__} of nvidia-smi)"
    return "; ".join(reported.splitlines())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu only shows that the script runs")
    parser.add_argument("--processes", type=int, help="of the second launch (default: the cards; 2 on a CPU)")
    parser.add_argument("--size", choices=SIZES, help="of the model (default: gpt-350m; nano on a CPU)")
    parser.add_argument("--seconds", type=float, default=120.0, help="of all turns of a launch, without building")
    parser.add_argument("--limit", type=float, default=90.0, help="seconds after which a contender is ended")
    parser.add_argument("--only", type=re.compile, default="", metavar="REGEX", help="contenders of such names")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none; --device cpu --seconds 1 shows that the script runs")
    gpu = options.device == "cuda"
    processes = options.processes or (torch.cuda.device_count() if gpu else 2)
    name = options.size or ("gpt-350m" if gpu else "nano")
    print(f"date: {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}\ncards and driver: {cards()}")
    print(f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version() if gpu else None}")
    print(conditions("benchmarks/gpu.py"))
    print(f"model: {name}, {SIZES[name].parameters:,} parameters, {SIZES[name]}\n\n{HEAD}", flush=True)
    for count in sorted({1, processes}):
        for line in lines_of(Launch(gpu, count, SIZES[name], options.seconds, options.limit), options.only):
            print(line, flush=True)
    print(f"\n{LEGEND}")


if __name__ == "__main__":
    main()
