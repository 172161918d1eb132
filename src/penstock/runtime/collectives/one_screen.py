"""An error on one screen: the rank and what happened, what to do, and the user's own lines. The rest is in a file.

    rank 1 failed in a step: RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 16x16)
    penstock: this was action 1F0@0 of rank 1; stage 1 holds the layers 2 to 3 ...
      train.py, line 22, in <module>: pipe.step(x, y)
      model.py, line 12, in forward: return self.out(x)
    the whole traceback: penstock-rank-1-x2kd81.txt, in the folder for temporary files

A rank whose error repeats that of another one prints one line. With ``PENSTOCK_TRACEBACK=full``, and where the process
has a hook of its own for uncaught errors, nothing of this is done.
"""

import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

import torch

from penstock.errors import visible

FULL = "PENSTOCK_TRACEBACK"
_OURS = tuple(str(Path(file).parent) + os.sep for file in (__file__.rpartition("runtime")[0] + "x", torch.__file__))
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platlib", "purelib"))
_MOST_LINES, _MOST_FRAMES, _MOST_LETTERS = 16, 12, 400
"""Of a sentence, of the user's code, and of what another rank has said."""
_REST = "the whole traceback: "


def is_wanted(hook: object) -> bool:
    """Whether errors may be shown on one screen in place of `hook`: Python's own, or that of ``penstock/__init__``."""
    known = hook is sys.__excepthook__ or getattr(hook, "__module__", "") == "penstock"
    return os.environ.get(FULL, "") != "full" and known


def sentence_of(error: BaseException) -> str:
    """The kind and the first line of an error."""
    return visible(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:1000])


def are_alike(one: str, other: str) -> bool:
    """Whether two errors say the same, perhaps with other names and numbers."""
    return SequenceMatcher(None, one, other, autojunk=False).ratio() > 0.9


def show_alone(error: BaseException) -> bool:
    """`show` without the other ranks: rank 0 shows the whole screen of its error, and another rank a line."""
    rank = os.environ.get("RANK", "")
    if not (rank.isdecimal() and isinstance(error, Exception) and is_wanted(sys.__excepthook__)):
        return False
    return show(error, int(rank), "outside the pipeline", sentence_of(error) if int(rank) else "")


def show(error: BaseException, rank: int, place: str, repeats: str) -> bool:
    """Prints `error`, with which `rank` failed in `place`. `repeats`: that it repeats the error of another rank, in
    words. Returns whether that could be done.
    """
    try:
        number, path = tempfile.mkstemp(prefix=f"penstock-rank-{rank}-", suffix=".txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(traceback.format_exception(error))
    except OSError:
        return False
    own, said = [*_own_lines(error)], f"{type(error).__name__}: {error}".strip().splitlines()
    if repeats:
        at = f" at {own[-1]}" if own else ""
        lines = [f"rank {rank}{at}: {repeats[:_MOST_LETTERS]} ({_REST}{path})"]
    else:
        lines = [f"rank {rank} failed {place}: {said[0]}", *said[1:_MOST_LINES]]
        lines += ["..."] if len(said) > _MOST_LINES else []
        lines += [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
        lines += [f"  {line}" for line in own[-_MOST_FRAMES:]]
        lines.append(f"{_REST}{path}")
    # In one piece, since the ranks share a terminal.
    sys.stderr.write(visible("\n".join(lines), lines=True) + "\n")
    sys.stderr.flush()
    return True


def _own_lines(error: BaseException) -> Iterator[str]:
    """The lines of the user's code from which `error` and its causes came, the calls first."""
    shown = set[tuple[str, int | None]]()
    chain: BaseException | None = error
    while chain is not None:
        for frame in traceback.extract_tb(chain.__traceback__):
            if (
                not frame.filename.startswith(("<", *_OURS, *_INSTALLED))
                and (frame.filename, frame.lineno) not in shown
            ):
                shown.add((frame.filename, frame.lineno))
                path = os.path.relpath(frame.filename)
                name = frame.filename if path.startswith("..") else path
                yield f"{name}, line {frame.lineno}, in {frame.name}: {frame.line}"
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
