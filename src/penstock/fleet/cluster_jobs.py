"""The leases of a round as jobs for a cluster's own scheduler: a Slurm script or a Kubernetes job for each.

The cluster starts and ends them. Penstock decides which job runs where in a round, and these files say so.
"""

import json
import math
import re
import shlex
from collections.abc import Sequence

from penstock.arguments import choice
from penstock.errors import PlanError
from penstock.fleet.round_scheduler import Lease

CLUSTERS = ("slurm", "kubernetes")
"""The schedulers that leases can be written for."""
_SAVE_SECONDS = 120
"""The time before the end of a lease at which the training gets its signal."""


def cluster_job(cluster: str, lease: Lease, words: Sequence[str], round_seconds: float, image: str = "") -> str:
    """The text of a file that runs `words` under torchrun for one round on the workers of `lease`.

    `cluster`: ``slurm`` or ``kubernetes``. `image`: the container of Kubernetes. Workers of one lease are taken for
    devices of one node; split jobs over nodes with the cluster's own means.
    """
    choice(CLUSTERS).check("cluster_job(cluster=)", cluster, PlanError)
    if cluster == "kubernetes" and not image:
        raise PlanError("cluster_job(image=): expected the container that has the training, found none: name it")
    training = ["torchrun", "--standalone", "--nproc-per-node", str(len(lease.workers)), *words]
    if cluster == "slurm":
        return _slurm_script(lease, training, round_seconds)
    return _kubernetes_job(lease, training, round_seconds, image)


def _slurm_script(lease: Lease, training: Sequence[str], round_seconds: float) -> str:
    """Slurm sends SIGUSR1 to every task before the time is over; the training saves and leaves."""
    name = _plain("-".join(lease.jobs))
    minutes = math.ceil((round_seconds + _SAVE_SECONDS) / 60)
    agent = [training[0], "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1", *training[1:]]
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node={_plain(lease.devices)}:{len(lease.workers)}
#SBATCH --time={minutes}
#SBATCH --signal=USR1@{_SAVE_SECONDS}
export PENSTOCK_FLEET_KIND={shlex.quote(lease.kind)}
exec srun {shlex.join(agent)}
"""


def _kubernetes_job(lease: Lease, training: Sequence[str], round_seconds: float, image: str) -> str:
    """Kubernetes sends SIGTERM at the deadline; the training saves and leaves within the grace period. The file is
    JSON, which every reader of YAML takes.
    """
    name = _plain("-".join(lease.jobs)).lower()
    container = {
        "name": "training",
        "image": image,
        "command": list(training),
        "env": [{"name": "PENSTOCK_FLEET_KIND", "value": lease.kind}],
        "resources": {"limits": {"nvidia.com/gpu": len(lease.workers)}},
    }
    pod = {
        "nodeSelector": {"penstock/kind": _plain(lease.devices)},
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _SAVE_SECONDS,
        "containers": [container],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"activeDeadlineSeconds": math.ceil(round_seconds), "backoffLimit": 0, "template": {"spec": pod}},
    }
    return json.dumps(job, indent=2) + "\n"


def _plain(name: str) -> str:
    """`name` with the characters only that names of cluster jobs may have."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "job"
