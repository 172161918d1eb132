"""Turns an error of one rank into an error of all ranks, around work that all of them do.

Ranks that wait for each other in a collective call would otherwise only see that a rank is gone.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn, TypeVar

from penstock.errors import PenstockError, TransportError
from penstock.runtime.transport.worlds import World

T = TypeVar("T")


def gather_results(world: World, context: str, work: Callable[[], T]) -> Sequence[T]:
    """Returns the results of `work`, which are plain, on every process of `world`, by rank. Collective.

    Raises like `agreed` if the work raised on one of them.
    """
    results: list[T] = []
    with agreed(world, context):
        results.append(work())
    return world.gather(results[0], context)


@contextmanager
def agreed(world: World, context: str) -> Iterator[None]:
    """Raises on every rank if the block raises on one. Collective: every rank reaches the end of the block, or raises.

    The failed rank raises its own error. The others raise the error of the first failed rank: one of the same type if
    the error is Penstock's, else a `TransportError` with the traceback. `context` says what the rank did: ``while it
    ...``.
    """
    try:
        yield
    except Exception as error:
        own = isinstance(error, PenstockError)
        text = str(error) if own else "".join(traceback.format_exception(error))
        # The error says more than that of a rank which does not come to read it.
        with suppress(TransportError):
            world.gather((type(error).__name__, text), context)
        raise
    for rank, failure in enumerate(world.gather(None, context)):
        if failure is not None:
            _raise(world, context, rank, *failure)


def _raise(world: World, context: str, rank: int, kind: str, text: str) -> NoReturn:
    # Only Penstock's own errors exist under the same name on every rank.
    kinds: list[type[PenstockError]] = [PenstockError, *PenstockError.__subclasses__()]
    known = {each.__name__: each for each in kinds}
    if kind in known:
        raise known[kind](f"rank {rank}, {context}: {text}")
    raise TransportError(
        f"rank {rank} failed {context}, so rank {world.rank} stops too. Fix the error below, which is rank {rank}'s, "
        f"and start again:\n{text}"
    )
