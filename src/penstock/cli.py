"""The command ``penstock``, also ``python -m penstock``.

It reads and writes files, and prints text for people or, with ``--json``, for machines. Exit codes: 0, done; 1,
refused, with one line that says why; 2, the command line is wrong.
"""

import argparse
import os
import sys
import textwrap
import traceback
from collections.abc import Sequence

from penstock import __version__
from penstock.commands import DOCTOR, FLEET, PLAN, PROBE, PROFILE, REHEARSE, SHOW, SIMULATE, VERIFY
from penstock.commands.command import Command
from penstock.errors import PenstockError, visible

_COMMANDS: tuple[Command, ...] = (REHEARSE, PROFILE, PROBE, PLAN, SIMULATE, VERIFY, SHOW, DOCTOR, FLEET)


def main(argv: Sequence[str] | None = None, program: str = "penstock") -> int:
    """Runs the command of `argv` (default: the process's arguments) and returns its exit code. `program`: the name that
    its help shows.
    """
    arguments = _parser(program).parse_args(argv)
    command: Command = arguments.command
    try:
        command.run(arguments)
        sys.stdout.flush()
    except PenstockError as error:
        if arguments.traceback:
            traceback.print_exc()
        print(f"penstock: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of the output (`| head`) has gone, so nothing may be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if arguments.traceback:
            traceback.print_exc()
        reason = f"{error.filename}: {error.strerror}"
        print(f"penstock: error: {visible(reason)}; give another path", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130  # what a shell reports of a process that was interrupted
    return 0


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description="Pipeline-parallel training for any PyTorch module: measure, plan, simulate, prove.",
        epilog="exit codes: 0 done, 1 refused (the reason is on stderr), 2 wrong command line",
    )
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.summary,
            description=textwrap.fill(command.description, 80),
            epilog=f"example:\n  {command.example.replace('penstock ', f'{program} ', 1)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.declare(subparser)
        subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
        subparser.add_argument("--traceback", action="store_true", help="show the traceback of an error as well")
        subparser.set_defaults(command=command)
    return parser
