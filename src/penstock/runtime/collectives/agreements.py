"""One idiom for work that all processes do: each does its own, all learn of an error, and then of the results.

An error of one becomes the same error of all. Unlike one in a step, it leaves the pipeline as it was: no process is
inside a step, and all of them know.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from penstock.errors import PenstockError, TransportError
from penstock.runtime.files.file_errors import files_explained

T = TypeVar("T")


class Gathering(Protocol):
    """The `World` of a pipeline, or `Ranks`. ``gather(value, context)`` returns the plain value of each rank to all."""

    @property
    def rank(self) -> int: ...

    @property
    def gather(self) -> Callable[..., Sequence[Any]]: ...


def gather_results(ranks: Gathering, context: str, work: Callable[[], T]) -> Sequence[T]:
    """Returns the results of `work`, which are plain, on every process of `ranks`, by rank. Collective.

    Raises like `agreed` if the work raised on one of them.
    """
    with agreed(ranks, context):
        result = work()
    return ranks.gather(result, context)


@contextmanager
def agreed(ranks: Gathering, context: str, *, alike: bool = False) -> Iterator[None]:
    """Raises on every rank if the block raises on one. Collective: every rank reaches the end of the block, or raises.

    The failed rank raises its own error. The others raise the error of the first failed rank: one of the same type if
    the error is Penstock's, else a `TransportError` with the traceback. `context` says what the rank did: ``while it
    ...``. `alike`: failed ranks raise the error of the first one, too, so that all go on in the same way; and a
    `TransportError`, which the others learn of themselves, is raised at once.
    """
    try:
        yield
    except Exception as error:
        if alike and isinstance(error, TransportError):
            raise
        text = str(error) if isinstance(error, PenstockError) else "".join(traceback.format_exception(error))
        kind = next((base for base in type(error).__mro__ if base in _errors().values()), type(error))
        outcomes: Sequence[Any] = ()
        # The error says more than that of a rank which does not come to read it.
        with suppress(TransportError):
            outcomes = ranks.gather((kind.__name__, text), context)
        if alike and len(outcomes) > 1:
            _raise_first(ranks.rank, context, outcomes, error)
        raise
    _raise_first(ranks.rank, context, ranks.gather(None, context), None)


def _errors(kind: type[PenstockError] = PenstockError) -> dict[str, type[PenstockError]]:
    """`kind` and what inherits from it in Penstock and is made of a text, by name: only these exist on every rank."""
    of_ours = [each for each in kind.__subclasses__() if each.__module__.startswith("penstock.")]
    below = [each for each in of_ours if "__init__" not in vars(each)]
    return {kind.__name__: kind} | {name: each for sub in below for name, each in _errors(sub).items()}


def _raise_first(here: int, context: str, outcomes: Sequence[Any], cause: Exception | None) -> None:
    """Raises, on rank `here`, the error of the first rank that failed, if there is one."""
    for rank, (kind, text) in ((rank, outcome) for rank, outcome in enumerate(outcomes) if outcome is not None):
        said = text.rstrip().splitlines() or [""]
        if known := _errors().get(kind):
            error: PenstockError = known(f"rank {rank}, {context}: {text}" if context else f"rank {rank}: {text}")
            what = f"rank {rank} failed {context}".rstrip(), f"{kind}: {said[0]}"
        else:
            error = TransportError(
                f"rank {rank} failed {context}, so rank {here} stops too. Fix the error below, which is rank {rank}'s, "
                f"and start again:\n{text}"
            )
            what = f"rank {rank} failed {context}", said[-1]
        if rank != here:
            error.repeats = f"{what[0]}, so rank {here} stops too: {what[1]}"
        raise error from cause


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that write or read files together. ``gather`` may be used by one thread at a time. What their work
    raises is the same `CheckpointError` on all.
    """

    rank: int
    gather: Callable[..., Sequence[Any]]

    def together(self, work: Callable[[], T]) -> Sequence[T]:
        """The plain results of `work` on every process, by rank. Collective."""
        return self.gather(self.each(work))

    def each(self, work: Callable[[], T]) -> T:
        """The result of `work` on this process. Collective."""
        with agreed(self, "", alike=True), files_explained():
            return work()

    def alone(self, work: Callable[[], T]) -> T | None:
        """The result of `work` on rank 0, which is the only one that does it. Collective."""
        return self.together(lambda: work() if self.rank == 0 else None)[0]
