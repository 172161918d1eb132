"""What every rank must do or none: work whose error on one rank is an error on all of them.

Ranks that wait for one another in a collective call would otherwise only see that a rank is gone.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock import errors
from penstock.errors import PenstockError, TransportError
from penstock.runtime.worlds import World

__all__ = ["gather_results"]

T = TypeVar("T")


def gather_results(world: World, place: str, work: Callable[[], T]) -> Sequence[T]:
    """What `work` returned on every process of `world`, by rank. Collective.

    If it raised somewhere, every rank raises: the failed one its own error, the others the first failed rank's. That
    is one of the same type if the error is Penstock's, else a `TransportError` with the traceback. `place` says in an
    error what the rank did: ``while it ...``.
    """
    try:
        mine: tuple[T | None, tuple[str, str] | None] = work(), None
    except Exception as error:
        if world.processes > 1:
            own = isinstance(error, PenstockError)
            text = str(error) if own else "".join(traceback.format_exception(error))
            world.gather((None, (type(error).__name__, text)))
        raise
    results = world.gather(mine)
    for rank, (_, failure) in enumerate(results):
        if failure is not None:
            kind, text = failure
            # Only errors of Penstock itself are known by name on every rank.
            if kind in errors.__all__:
                known: type[PenstockError] = getattr(errors, kind)
                raise known(f"rank {rank}, {place}: {text}")
            raise TransportError(
                f"rank {rank} failed {place}, so rank {world.rank} stops too. Mend the error below, which is rank "
                f"{rank}'s, and start again:\n{text}"
            )
    return [result for result, _ in results]  # type: ignore[misc]  # who did not fail has a result
