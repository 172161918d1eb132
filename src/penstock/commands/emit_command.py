"""``penstock emit``: write a job for a cluster's scheduler that trains with a plan."""

import argparse
from pathlib import Path

from penstock.commands.command import Command, answer, given
from penstock.commands.quantities import parse_count
from penstock.errors import PlanError
from penstock.values import Plan
from penstock.values.documents import write_text


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file (YAML), which says how many processes there are")
    parser.add_argument("words", metavar="SCRIPT", nargs="+", help="the training, and its arguments after --")
    text = "slurm (default), jobset, trainjob, skypilot"
    parser.add_argument("--cluster", metavar="NAME", default="slurm", help=text)
    parser.add_argument("--per-host", type=parse_count, metavar="N", default=8, help="devices of a host (default: 8)")
    parser.add_argument("--image", metavar="IMAGE", default="", help="the container that has the training")
    parser.add_argument("--device", metavar="NAME", default="", help="the kind of device, by the scheduler's name")
    parser.add_argument("--seconds", type=float, metavar="S", help="how long the job may run")
    parser.add_argument("-o", "--output", metavar="FILE", help="write it to this file")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.fleet import ClusterJob

    plan = Plan.load(arguments.plan)
    processes = plan.ranks * plan.tensor_parallel
    per_host = min(arguments.per_host, processes)
    if processes % per_host:
        raise PlanError(
            f"{arguments.plan}: expected a multiple of {per_host} processes, as many on every host, found {processes}: "
            "give another --per-host, or another plan"
        )
    words, about = tuple(arguments.words), given(arguments, "image", "device", "seconds")
    job = ClusterJob(Path(words[0]).stem, words, hosts=processes // per_host, per_host=per_host, **about)
    text = job.text(arguments.cluster)
    if arguments.output:
        write_text(arguments.output, text, PlanError)
    shown = f"wrote {arguments.output}" if arguments.output else text.rstrip()
    answer(arguments, shown, {"cluster": arguments.cluster, "text": text})


EMIT = Command(
    name="emit",
    summary="write a job for a cluster's scheduler",
    description="Writes a Slurm script, a JobSet or a Kubeflow TrainJob of Kubernetes, or a SkyPilot task, which "
    "starts the processes of a plan by torchrun, and lets the training save before it is ended.",
    example="penstock emit plan.yaml train.py --cluster jobset --image me/train:1 -o job.yaml",
    declare=_declare,
    run=_run,
)
