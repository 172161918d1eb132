"""Trains over NCCL and says whether the numbers are the oracle's: ``nccl_script.py SCHEDULE REPLICAS CARDS``.

REPLICAS of two stages, such as 1-2. CARDS: "own" if each process has a GPU, "one" if all share the first one, which
NCCL refuses unless it takes them for processes of several hosts.
"""

import os
import sys

if sys.argv[3] == "one":
    os.environ.update(PENSTOCK_NCCL="1", NCCL_HOSTID=f"host{os.environ['RANK']}")

import torch
import torch.distributed as dist

from penstock.runtime.nccl_ends import NcclInbox
from penstock.runtime.transport import Edge
from penstock.runtime.worlds import join_world
from training import Case, run_pipeline, run_reference, stages_on_a_rank


def main() -> None:
    """Ends with 0 if all is well."""
    schedule, replicas = sys.argv[1], tuple(int(count) for count in sys.argv[2].split("-"))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank if sys.argv[3] == "own" else 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    edges = [Edge(source, (source + 1) % ranks) for source in range(ranks)]
    transport = join_world().connect(edges, device, 60.0)
    ticket = transport.post(Edge((rank - 1) % ranks, rank), "form")
    assert isinstance(ticket.inbox, NcclInbox)  # type: ignore[attr-defined]
    transport.send(Edge(rank, (rank + 1) % ranks), "form", (torch.full((3,), float(rank), device=device),))
    (tensor,) = ticket.wait()
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
    expected, found = run_reference(case), run_pipeline(case)
    torch.testing.assert_close(found.losses, expected.losses, rtol=0, atol=0)
    for name, value in found.state.items():
        torch.testing.assert_close(value, expected.state[name], rtol=0, atol=0, msg=name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
