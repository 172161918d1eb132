"""A training as a job of a cluster: a Slurm script, a JobSet or TrainJob of Kubernetes, or a SkyPilot task.

The cluster starts the processes and ends them: it sends a signal before, and the training saves and leaves.
"""

import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

import yaml

from penstock.arguments import choice
from penstock.errors import PlanError

CLUSTERS = ("slurm", "jobset", "trainjob", "skypilot")
"""The schedulers that jobs can be written for."""
_SAVE_SECONDS = 120
"""The time before the end of a job at which the training gets its signal."""
_PORT = 29500


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A training that torchrun starts on `hosts` hosts, with `per_host` processes on each."""

    name: str
    words: tuple[str, ...]
    """The script and its arguments."""
    hosts: int
    per_host: int
    image: str = ""
    """The container that has the training."""
    device: str = ""
    """The kind of device, by the scheduler's name."""
    seconds: float | None = None
    """How long it may run."""

    def text(self, cluster: str) -> str:
        """The file for `cluster`, one of `CLUSTERS`. `PlanError` if it needs what is not known."""
        match choice(CLUSTERS).check("cluster", cluster, PlanError):
            case "slurm":
                return self._slurm()
            case "jobset":
                made = self._jobset()
            case "trainjob":
                made = self._trainjob()
            case _:
                made = self._skypilot()
        text: str = yaml.safe_dump(made, sort_keys=False, width=1000)
        return text

    def _agent(self, address: str, run: str) -> str:
        """The command line of torchrun on each host, which meet at `address`, a text for a shell as `run` is."""
        meeting = ["--nnodes", str(self.hosts), "--rdzv-backend", "c10d", "--rdzv-endpoint", address, "--rdzv-id", run]
        where = meeting if self.hosts > 1 else ["--standalone"]
        signals = ["--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
        return " ".join(["torchrun", *signals, *where, f"--nproc-per-node {self.per_host}", shlex.join(self.words)])

    def _slurm(self) -> str:
        """Slurm sends SIGUSR1 to every task before the time is over."""
        kind = f"{_plain(self.device)}:" if self.device else ""
        lines = [f"--job-name={_plain(self.name)}", f"--nodes={self.hosts}", "--ntasks-per-node=1"]
        lines += [f"--gpus-per-node={kind}{self.per_host}"]
        if self.seconds is not None:
            lines += [f"--time={math.ceil((self.seconds + _SAVE_SECONDS) / 60)}"]
        lines += [f"--signal=USR1@{_SAVE_SECONDS}", "--requeue"]
        first = '"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)'
        agent = self._agent(f'{first}:{_PORT}"', '"$SLURM_JOB_ID"')
        return "\n".join(["#!/bin/bash", *(f"#SBATCH {line}" for line in lines), f"exec srun {agent}", ""])

    def _jobset(self) -> dict[str, Any]:
        """Kubernetes sends SIGTERM at the deadline, and SIGKILL after the grace period."""
        if not self.image:
            raise PlanError("image: expected the container that has the training, found none: give --image")
        name = _plain(self.name).lower()
        # The first pod, by the name that its JobSet gives it.
        agent = shlex.split(self._agent(f"{name}-workers-0-0.{name}:{_PORT}", name))
        container = {"name": "training", "image": self.image, "command": agent, "resources": self._devices()}
        pod: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": _SAVE_SECONDS}
        pod |= {"nodeSelector": {"penstock/kind": _plain(self.device)}} if self.device else {}
        job: dict[str, Any] = {"completionMode": "Indexed", "parallelism": self.hosts, "completions": self.hosts}
        job |= {"backoffLimit": 0, "template": {"spec": pod | {"containers": [container]}}}
        job |= {} if self.seconds is None else {"activeDeadlineSeconds": math.ceil(self.seconds)}
        spec: dict[str, Any] = {"replicatedJobs": [{"name": "workers", "replicas": 1, "template": {"spec": job}}]}
        spec["failurePolicy"] = {"maxRestarts": 3}
        return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": name}, "spec": spec}

    def _trainjob(self) -> dict[str, Any]:
        """The runtime says to torchrun in ``PET_*`` variables where the hosts meet."""
        trainer: dict[str, Any] = {"numNodes": self.hosts, "numProcPerNode": self.per_host}
        trainer |= {"image": self.image} if self.image else {}
        trainer |= {"command": ["torchrun", *self.words], "resourcesPerNode": self._devices()}
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
        head = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
        return {**head, "metadata": {"name": _plain(self.name).lower()}, "spec": spec}

    def _skypilot(self) -> dict[str, Any]:
        """SkyPilot starts the command on every node, with the addresses of all."""
        if not self.device:
            raise PlanError("device: expected the name of an accelerator such as H100, found none: give --device")
        resources: dict[str, Any] = {"accelerators": f"{self.device}:{self.per_host}"}
        resources |= {"image_id": f"docker:{self.image}"} if self.image else {}
        run = self._agent(f'"$(echo "$SKYPILOT_NODE_IPS" | head -1):{_PORT}"', '"$SKYPILOT_TASK_ID"')
        task = {"name": _plain(self.name).lower(), "num_nodes": self.hosts, "resources": resources, "workdir": "."}
        return {**task, "run": run}

    def _devices(self) -> dict[str, Any]:
        return {"limits": {"nvidia.com/gpu": self.per_host}}


def _plain(name: str) -> str:
    """`name` with the characters only that names of cluster jobs may have."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "job"
