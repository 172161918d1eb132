"""``penstock doctor``: find out why a run stands still."""

import argparse
from pathlib import Path

from penstock.commands.command import Command, answer, declare_option, given
from penstock.errors import PenstockError
from penstock.progress import elapsed_line
from penstock.values.documents import write_text


def _declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="RUN_DIR", help="the run directory (PENSTOCK_RUN_DIR of the run)")
    parser.add_argument("--html", metavar="PAGE", help="write the diagnosis with all stacks to this file (HTML)")
    text = "how long the ranks may take to answer (default: 5)"
    declare_option(parser, "--wait", text, type=float, metavar="SECONDS", dest="wait_seconds")


def _run(arguments: argparse.Namespace) -> None:
    from penstock.doctor.diagnosis import diagnose
    from penstock.doctor.reports import report_document, report_page, report_text
    from penstock.doctor.run_directories import RunDirectory, examine

    with elapsed_line("waiting for the ranks"):
        evidence = examine(RunDirectory(Path(arguments.directory)), signals=True, **given(arguments, "wait_seconds"))
    found = diagnose(evidence)
    if arguments.html:
        write_text(arguments.html, report_page(evidence, found), PenstockError)
    answer(arguments, report_text(evidence, found), report_document(evidence, found), arguments.html)


DOCTOR = Command(
    name="doctor",
    summary="find out why a run stands still",
    description="Asks every rank of a run where it is, what it waits for and since when, and names the rank to blame: "
    "dead, stopped, slow, in the user's code, or out of step. The run goes on. Ranks on other hosts answer over a "
    "shared file system.",
    example="penstock doctor /shared/runs/7 --html page.html",
    declare=_declare,
    run=_run,
)
