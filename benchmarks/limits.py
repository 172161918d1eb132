"""Trains each rank in a memory cgroup of its plan's bytes and 5 %: none is killed, and without the order one is.

    python benchmarks/limits.py --save benchmarks/results/limits.txt

Needs root on Linux with the memory controller of cgroup v1. Every process starts in a cgroup of its own. It imports,
makes its batch, and trains on small microbatches as a warm-up. Its *base* is what the cgroup then holds, all but the
pages of files, which the kernel can reclaim; and two messages for each neighbour: those of the memory that it shares
with it, or those that Gloo takes in before they are due, as the times happen to be. Now the limit of the cgroup becomes
the base, what the simulator predicts for the rank under the plan, and 5 % of that, and two steps are trained. The
second run has the same limits, and the order as it was before it was limited: the named one, or that with all that was
found but the offloads. The kernel has to kill a process there. The exit code is 1 if any of this is not so.

`measured`: the most that a cgroup held beyond its base, over the prediction. With offloads it is the most that was
resident, over Gloo: the pages of the file are in the cgroup, and may take what is left of the limit. The model is a
small language model with wide logits, so that the last stage holds most. Its processes share the cores.
"""

import argparse
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from contenders.jobs import sgd
from measurement.reports import Report, conditions, option_parser, table
from measurement.resident_memory import ALLOCATOR, forget_peak, resident_bytes
from penstock.planning import find_order, limit_order
from penstock.runtime.transport.backend_selection import SHARED_MEMORY
from penstock.scheduling import define_by_programs
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

CONTROLLER = Path("/sys/fs/cgroup/memory")
WIDTH, WORDS, SAMPLES = 64, 512, 16384
STEPS = 2
HOST_BANDWIDTH = 2e10


@dataclass(frozen=True, slots=True)
class Case:
    """A plan of `blocks` under a limit: `share` of what `schedule` takes on its fullest rank."""

    name: str
    ranks: int
    schedule: str
    share: float
    per_rank: int = 1
    microbatches: int = 6
    blocks: int = 6
    is_found: bool = False
    offloads: bool = False


CASES = (
    Case("zb-h1", 3, "zb-h1", 0.75),
    Case("spp", 3, "spp", 0.75),
    Case("interleaved", 2, "interleaved", 0.75, per_rank=2),
    Case("zb-v", 2, "zb-v", 0.75, per_rank=2),
    Case("v-half", 3, "v-half", 0.8, per_rank=2),
    Case("v-min", 3, "v-min", 0.8, per_rank=2),
    Case("found", 3, "zb-h1", 0.7, is_found=True),
    Case("found in a V", 2, "zb-v", 0.7, per_rank=2, is_found=True),
    Case("offloads", 4, "1f1b-flush", 0.75, is_found=True, offloads=True),
)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        embedded: Tensor = self.words(words)
        return embedded


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.narrow(F.gelu(self.wide(self.norm(x))))
        return x + added


def model_of(case: Case) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Block() for _ in range(case.blocks)), nn.Linear(WIDTH, WORDS))


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (samples + 1,), generator=torch.Generator().manual_seed(1))
    return words[:-1], words[1:]


def plans_of(case: Case, profile: Profile) -> tuple[Plan, Plan]:
    """The plan that holds the limit, and one of the same stages that does not."""
    weights = [layer.forward_seconds + layer.backward_seconds for layer in profile.layers]
    stages = case.ranks * case.per_rank
    free = Plan.balanced(weights, stages, case.schedule, microbatches=case.microbatches, stages_per_rank=case.per_rank)
    cluster = Cluster.uniform(case.ranks, 1e9)
    limit = case.share * max(peaks_of(free, profile, cluster))
    if not case.is_found:
        return limit_order(free, profile, cluster, memory_bytes=limit, optimizer_copies=0), free
    if not case.offloads:
        return find_order(free, profile, cluster, memory_bytes=limit, optimizer_copies=0).plan, free
    fast = replace(cluster, host_bandwidth=HOST_BANDWIDTH)
    found = find_order(free, profile, fast, memory_bytes=limit, optimizer_copies=0).plan
    assert any("H" in row for row in found.order), "another limit is needed on this machine"
    rows = ["".join(f"{word} " for word in row.split() if "H" not in word and "D" not in word) for row in found.order]
    return found, replace(found, schedule=define_by_programs("stays", "\n".join(rows)), predicted=None)


def peaks_of(plan: Plan, profile: Profile, cluster: Cluster) -> list[float]:
    return [memory.peak_bytes for memory in penstock.simulate(plan, profile, cluster, optimizer_copies=0).memory]


def held_bytes(group: Path) -> int:
    """What a cgroup holds and cannot reclaim."""
    counted = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    files = int(counted["active_file"]) + int(counted["inactive_file"])
    return int((group / "memory.usage_in_bytes").read_text()) - files


def kills(group: Path) -> int:
    """How many processes of a cgroup the kernel has killed."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))


def work(options: argparse.Namespace) -> None:
    """One rank, in its cgroup."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    plan, group, case = Plan.load(options.plan), options.group, CASES[options.case]
    x, y = batch_of(SAMPLES * plan.microbatches)
    train(case, plan, options.plan.parent, *batch_of(64 * plan.microbatches))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base, before = held_bytes(group) + options.messages, resident_bytes("VmRSS")
    (group / "memory.limit_in_bytes").write_text(str(round(base + options.margin * options.predicted)))
    (group / "memory.max_usage_in_bytes").write_text("0")
    forget_peak()
    losses = train(case, plan, options.plan.parent, x, y)
    # The pages of files are in the usage, too.
    usage = int((group / "memory.max_usage_in_bytes").read_text()) - base
    measured = resident_bytes("VmHWM") - before if case.offloads else usage
    options.worker.write_text(json.dumps({"base": base, "measured": measured, "losses": losses}))
    torch.distributed.barrier()


def train(case: Case, plan: Plan, directory: Path, x: Tensor, y: Tensor) -> list[float]:
    sample = x[: len(x) // plan.microbatches]
    pipe = penstock.Pipeline(
        model_of(case), (sample,), F.cross_entropy, sgd, plan=plan, offload_to=directory, check="off"
    )
    losses = [float(pipe.step(x, y).loss) for _ in range(STEPS)]
    pipe.close()
    return losses


def launch(
    options: argparse.Namespace, case: int, plan: Plan, predicted: Sequence[float], *, shared: bool
) -> tuple[list[int], list[Any]]:
    """Runs `plan`, each rank in a cgroup of its own. Returns the ranks that the kernel killed, and what the ranks found
    if none was killed. Whatever else ends a rank is an error.
    """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name, ExitStack() as stack:
        folder = Path(name)
        plan.save(folder / "plan.yaml")
        common = ["--case", case, "--plan", folder / "plan.yaml", "--margin", options.margin]
        environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", SHARED_MEMORY: str(int(shared))}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(predicted))}
        processes, groups, reports = [], [], []
        for rank, size in enumerate(predicted):
            groups.append(CONTROLLER / f"penstock-{os.getpid()}-{rank}")
            reports.append(folder / f"{rank}.json")
            groups[-1].mkdir()
            stack.callback(groups[-1].rmdir)
            # A process that enters after its imports would have left their bytes elsewhere.
            enter = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', groups[-1], sys.executable, __file__]
            command = [*enter, *common, "--worker", reports[-1], "--predicted", size, "--group", groups[-1]]
            command += ["--messages", message_bytes(plan, rank)]
            errors = stack.enter_context((folder / f"{rank}.err").open("w"))
            own = {**environment, "RANK": str(rank)}
            processes.append(subprocess.Popen(list(map(str, command)), env=own, stderr=errors))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(0.05)
        if killed := [rank for rank, group in enumerate(groups) if kills(group)]:
            return killed, []
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise SystemExit(f"rank {failed[0]} failed:\n{(folder / f'{failed[0]}.err').read_text()}")
        return [], [json.loads(report.read_text()) for report in reports]


def message_bytes(plan: Plan, rank: int) -> int:
    """Two messages for every rank that `rank` sends to and receives from."""
    others = {stage.ranks[0] for stage in plan.stages if stage.ranks[0] != rank}
    near = [{before.ranks[0], after.ranks[0]} for before, after in pairwise(plan.stages)]
    return 2 * SAMPLES * WIDTH * 4 * sum({rank, other} in near for other in others)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def row(options: argparse.Namespace, index: int, profile: Profile, *, shared: bool) -> list[str]:
    case = CASES[index]
    limited, free = plans_of(case, profile)
    cluster = replace(Cluster.uniform(case.ranks, 1e9), host_bandwidth=HOST_BANDWIDTH)
    predicted = peaks_of(limited, profile, cluster)
    killed, found = launch(options, index, limited, predicted, shared=shared)
    without, _ = launch(options, index, free, predicted, shared=shared)
    shares = [f"{each['measured'] / size:.3f}" for each, size in zip(found, predicted, strict=False)]
    return [
        case.name,
        "shared" if shared else "Gloo",
        f"{limited.schedule}, {len(limited.stages)}",
        _mebibytes(predicted),
        _mebibytes(peaks_of(free, profile, cluster)),
        _mebibytes([each["base"] for each in found]),
        "" if case.offloads and shared else " ".join(shares),
        " ".join(map(str, killed)) or "none",
        " ".join(map(str, without)) or "NONE",
    ]


def _mebibytes(sizes: Sequence[float]) -> str:
    return " ".join(f"{size / 2**20:.0f}" for size in sizes)


def main() -> None:
    parser = option_parser(__doc__, worker=True)
    parser.add_argument("--case", type=int, help="this one of the cases alone, from 0 on")
    parser.add_argument("--margin", type=float, default=1.05, help="limit over prediction")
    for name in ("--plan", "--group"):
        parser.add_argument(name, type=Path, help=argparse.SUPPRESS)
    for name in ("--predicted", "--messages"):
        parser.add_argument(name, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options)
        return
    shown = Report(options.save)
    shown.add(conditions("benchmarks/limits.py"))
    x, y = batch_of(SAMPLES)
    rows = []
    for index in range(len(CASES)) if options.case is None else [options.case]:
        profile = penstock.profile(model_of(CASES[index]), (x,), loss_fn=F.cross_entropy, target=y, progress=False)
        for shared in (True, False):
            rows.append(row(options, index, profile, shared=shared))
            print(*rows[-1], sep="; ", flush=True)
    head = ["case", "messages", "order, stages", "MiB by rank", "without", "base", "measured", "killed"]
    shown.add(table([*head, "killed without"], rows))
    sys.exit(any(each[-2] != "none" or each[-1] == "NONE" for each in rows))


if __name__ == "__main__":
    main()
