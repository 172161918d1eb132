"""Makes an error of one process the same error of all, around work on files that all of them do.

Unlike an error in a step, it leaves the pipeline as it was: no process is inside a step, and all of them know.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import CheckpointError, TransportError

T = TypeVar("T")

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free space or give"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Correct the permissions or give"),
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that write or read a checkpoint together. ``gather(value)`` returns the value of each, by rank, to
    all; it may be used by one thread at a time. Values are plain: `penstock.runtime.files.plain_values`.
    """

    rank: int
    gather: Callable[[Any], Sequence[Any]]

    def together(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on every process, by rank. If it raises on one, all raise the same `CheckpointError`.
        Collective.
        """
        result: list[T] = []
        self.each(lambda: result.append(work()))
        return list(self.gather(result[0]))

    def each(self, work: Callable[[], T]) -> T:
        """The result of `work` on this process. Raises as `together` does. Collective."""
        result: list[T] = []
        error: Exception | None = None
        outcome = "", ""
        try:
            result.append(work())
        except TransportError:
            raise
        except Exception as caught:
            error, shown = caught, explained(caught)
            outcome = str(shown), type(shown).__name__
        gathered = self.gather(outcome)
        kinds = {kind.__name__: kind for kind in CheckpointError.__subclasses__()}
        for rank, (text, kind) in enumerate(gathered):
            if text:
                where = f"rank {rank}: " if len(gathered) > 1 else ""
                raise kinds.get(kind, CheckpointError)(where + text) from error
        return result[0]

    def alone(self, work: Callable[[], T]) -> T | None:
        """The result of `work` on rank 0, which is the only one that does it. Raises as `together` does. Collective."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]


def explained(error: Exception, path: object = None) -> CheckpointError:
    """`error` as a `CheckpointError`, with the file and the way out. `path`: the file, where the error has none."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        return CheckpointError(
            f"{error.filename or path or 'the checkpoint'}: expected to write or read it, found: "
            f"{error.strerror or error}. {_ADVICE.get(error.errno or 0, 'Give')} another directory; older "
            "checkpoints are whole, and the pipeline can go on"
        )
    return CheckpointError(
        f"{path or 'the checkpoint'}: expected to write or read it, found {type(error).__name__}: {error}. Older "
        "checkpoints are whole, and the pipeline can go on"
    )
