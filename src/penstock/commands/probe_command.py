"""``penstock probe``: measure the links between the ranks."""

import argparse

from penstock.commands.command import Command, declare_option, declare_progress, deliver, given
from penstock.progress import is_first


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="CLUSTER", help="write the cluster to this file (YAML)")
    declare_option(parser, "--device", "where the messages are: cpu, cuda, cuda:1 (default: the GPU if any)")
    text = "where offloads go: on CPUs a directory, to measure how fast it is (default: the host's memory)"
    declare_option(parser, "--offload-to", text, metavar="DIRECTORY")
    text = "how long a rank waits for another one (default: 60)"
    declare_option(parser, "--timeout", text, type=float, dest="timeout_seconds", metavar="SECONDS")
    declare_progress(parser)


def _run(arguments: argparse.Namespace) -> None:
    from penstock.commands.descriptions import describe_cluster
    from penstock.profiling import probe

    measured = probe(**given(arguments, "device", "offload_to", "timeout_seconds", "progress"))
    # Every rank has the whole cluster; one of them prints it.
    if is_first():
        deliver(measured, describe_cluster(measured), arguments)


PROBE = Command(
    name="probe",
    summary="measure the links between the ranks",
    description="Measures latency and bandwidth between all ranks that torchrun started, both ways, through the "
    "transport of the pipeline, and on CPUs what messages and actions take from the ranks. A host measures one pair at "
    "a time, for about half a second; links below 1 Gbit/s take some seconds.",
    example="torchrun --nproc-per-node 4 --no-python penstock probe -o cluster.yaml",
    declare=_declare,
    run=_run,
)
