"""Jobs for the processes of the probe's tests."""

import torch.distributed as dist

import penstock
from penstock.values import Cluster

__all__ = ["probe_here", "probe_with_a_failing_rank"]


def probe_here() -> Cluster:
    """The cluster that this rank gets."""
    return penstock.probe(progress=False)


def probe_with_a_failing_rank(failing: int) -> str:
    """The error of this rank, if the failing one probes a device that does not exist."""
    device = "cuda:99" if dist.get_rank() == failing else "cpu"
    try:
        penstock.probe(device=device, progress=False, timeout_seconds=20.0)
    except penstock.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "probed"
