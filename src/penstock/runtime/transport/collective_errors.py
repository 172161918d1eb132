"""What every rank must do or none: work whose error on one rank is an error on all of them.

Ranks that wait for one another in a collective call would otherwise only see that a rank is gone.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from penstock import errors
from penstock.errors import PenstockError, TransportError
from penstock.runtime.transport.worlds import World

__all__ = ["agreed", "gather_results"]

T = TypeVar("T")


def gather_results(world: World, place: str, work: Callable[[], T]) -> Sequence[T]:
    """What `work` returned on every process of `world`, by rank; if it raised on one, as `agreed`. Collective."""
    results: list[T] = []
    with agreed(world, place):
        results.append(work())
    return world.gather(results[0])


@contextmanager
def agreed(world: World, place: str) -> Iterator[None]:
    """Raises on every rank if the body raises on one. Collective: every rank comes to the end of the body, or raises.

    The failed rank raises its own error, the others the first failed rank's: one of the same type if the error is
    Penstock's, else a `TransportError` with the traceback. `place` says what the rank did: ``while it ...``.
    """
    try:
        yield
    except Exception as error:
        own = isinstance(error, PenstockError)
        text = str(error) if own else "".join(traceback.format_exception(error))
        world.gather((type(error).__name__, text))
        raise
    for rank, failure in enumerate(world.gather(None)):
        if failure is not None:
            _raise(world, place, rank, *failure)


def _raise(world: World, place: str, rank: int, kind: str, text: str) -> NoReturn:
    # Only errors of Penstock itself are known by name on every rank.
    if kind in errors.__all__:
        known: type[PenstockError] = getattr(errors, kind)
        raise known(f"rank {rank}, {place}: {text}")
    raise TransportError(
        f"rank {rank} failed {place}, so rank {world.rank} stops too. Mend the error below, which is rank {rank}'s, "
        f"and start again:\n{text}"
    )
