"""The command ``penstock``, also ``python -m penstock``.

It reads and writes files, and prints text for people or, with ``--json``, for machines. Exit codes: 0, done; 1,
refused, with one line that says why; 2, the command line is wrong.
"""

import argparse
import io
import os
import platform
import sys
import textwrap
import traceback
from collections.abc import Sequence

from penstock import __version__
from penstock.commands import COMMANDS
from penstock.commands.command import Command
from penstock.commands.completion_command import Word
from penstock.errors import PenstockError, visible
from penstock.progress import colored

_RUN_ON = """\
Its tests have passed on CPUs with PyTorch 2.11 and 2.13 and Python 3.11 and 3.12, and on one NVIDIA H200 with PyTorch
2.11. Several GPUs have not been tried."""


def main(argv: Sequence[str] | None = None, program: str = "penstock") -> int:
    """Runs the command of `argv` (default: the process's arguments) and returns its exit code. `program`: the name that
    its help shows.
    """
    try:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # Names may have characters that the terminal's encoding lacks.
            sys.stdout.reconfigure(errors="backslashreplace")
        arguments = _parser(program).parse_args(argv)
        command: Command = arguments.command
        command.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output (`| head`) has gone, so nothing may be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (PenstockError, OSError) as error:
        if arguments.traceback:
            traceback.print_exc()
        text = str(error)
        if isinstance(error, OSError):
            text = visible(f"{error.filename}: {error.strerror}") + "; give another path"
        print(f"{colored('penstock: error:', '1;31', sys.stderr)} {text}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports of a process that was interrupted
    return 0


class _ShowVersion(argparse.Action):
    """Prints the version, the versions of what it runs on, and what it has been tested on."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> None:
        from importlib.metadata import PackageNotFoundError, version

        try:
            torch = f"PyTorch {version('torch')}"
        except PackageNotFoundError:
            torch = "no PyTorch"
        about = f"Python {platform.python_version()}, {torch}, {platform.system()} {platform.machine()}"
        print(f"penstock {__version__}\n{about}\n{_RUN_ON}", flush=True)
        parser.exit()


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Pipeline-parallel training for any PyTorch module: measure, plan, simulate, prove.",
        epilog="exit codes: 0 done, 1 refused (the reason is on stderr), 2 wrong command line",
    )
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="show the version, and what it has been tested on, and exit"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=textwrap.fill(command.description, 80),
            epilog=f"example:\n  {command.example.replace('penstock ', f'{program} ', 1)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        subparser.register("action", None, Word)
        command.declare(subparser)
        subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
        subparser.add_argument("--traceback", action="store_true", help="show the traceback of an error as well")
        subparser.set_defaults(command=command, parser=parser)
    return parser
