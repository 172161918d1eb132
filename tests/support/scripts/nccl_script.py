"""Trains over NCCL and says whether the numbers are the oracle's: ``nccl_script.py SCHEDULE REPLICAS CARDS SECONDS``.

REPLICAS of two stages, such as 1-2. CARDS: "own" if each process has a GPU; "bound" if the default
group is NCCL's as well and bound to them; "one" if all share the first one, which NCCL refuses unless it takes them for
processes of several hosts; "none" if they compute on the CPU and send over Gloo, which tries the script itself.
After SECONDS it ends, and says where its threads are.
"""

import faulthandler
import os
import sys
from pathlib import Path

if sys.argv[3] == "one":
    # NCCL reads them when it is first called.
    os.environ.update(
        PENSTOCK_NCCL="1",
        # NCCL refuses processes of one host on one GPU, and tells hosts apart by this.
        NCCL_HOSTID=f"host{os.environ['RANK']}",
        # Between hosts there is a network: here sockets, on the interface that every machine has.
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        # NVLink does not join them either.
        NCCL_MNNVL_ENABLE="0",
    )
# The modules of the tests lie one folder up.
sys.path.append(str(Path(__file__).absolute().parents[2]))

import torch
import torch.distributed as dist

from penstock.runtime.transport.nccl.endpoints import NcclInbox
from penstock.runtime.transport.transport import Edge
from penstock.runtime.transport.worlds import join_world
from support.outcome_comparisons import assert_same
from support.training import Case, run_pipeline, run_reference, stages_on_a_rank


def main() -> None:
    """Ends with 0 if all is well."""
    faulthandler.dump_traceback_later(float(sys.argv[4]), exit=True)
    schedule, replicas, cards = sys.argv[1], tuple(int(count) for count in sys.argv[2].split("-")), sys.argv[3]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cpu") if cards == "none" else torch.device("cuda", 0 if cards == "one" else rank)
    if cards != "none":
        torch.cuda.set_device(device)
    if cards == "bound":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    edges = [Edge(source, (source + 1) % ranks) for source in range(ranks)]
    transport = join_world().connect(edges, device, float(sys.argv[4]) / 2)
    receive = transport.post(Edge((rank - 1) % ranks, rank), "form")
    assert isinstance(receive.inbox, NcclInbox) == (cards != "none")  # type: ignore[attr-defined]
    transport.send(Edge(rank, (rank + 1) % ranks), "form", (torch.full((3,), float(rank), device=device),))
    (tensor,) = receive.wait()
    assert tensor is not None and tensor.tolist() == [float((rank - 1) % ranks)] * 3
    transport.close()
    torch.use_deterministic_algorithms(True)
    plain = replicas == (1, 1)
    case = Case(
        "normalized",
        schedule,
        2,
        4,
        "adamw",
        stages_on_a_rank(schedule),
        device=str(device),
        replicas=() if plain else replicas,
    )
    assert_same(run_reference(case), run_pipeline(case))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
