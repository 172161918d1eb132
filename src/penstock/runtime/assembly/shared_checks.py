"""The checks of a captured model, shared among the ranks.

A check runs the model several times, and all ranks have captured the same one. So each check runs on one rank, and its
result holds for all. Ranks that have captured different models each run all checks of their own.
"""

from collections.abc import Sequence

from penstock.capturing.chain import LayerChain
from penstock.capturing.chain_checks import UncheckedChain
from penstock.errors import CaptureError
from penstock.runtime.transport.collective_errors import agreed, gather_results
from penstock.runtime.transport.worlds import World

__all__ = ["check_together"]


def check_together(world: World, unchecked: UncheckedChain, digest: str | None) -> LayerChain:
    """The chain after its checks. `digest`: that of `unchecked`, by `digest_of`. Collective.

    Raises `CaptureError` on every rank if the chain must not be used.
    """
    digests = world.gather(digest, "while they compared their captured models")
    if None in digests or len(set(digests)) > 1:
        with agreed(world, "while it checked its captured model"):
            return unchecked.checked()
    shares = _shares([check.runs for check in unchecked.checks], world.processes)

    def run() -> list[bool | str]:
        found: list[bool | str] = []
        for index, rank in enumerate(shares):
            if rank == world.rank:
                try:
                    found.append(unchecked.run_check(index))
                except CaptureError as error:
                    found.append(str(error))
        return found

    if not shares:
        return unchecked.chain
    gathered = list(map(iter, gather_results(world, "while it checked the captured model", run)))
    verdicts = []
    for rank in shares:
        verdict = next(gathered[rank])
        if isinstance(verdict, str):
            raise CaptureError(verdict)
        verdicts.append(verdict)
    return unchecked.after(verdicts)


def _shares(runs: Sequence[int], processes: int) -> list[int]:
    """The rank that runs each check, which takes as long as `runs` runs: the longest first, to the least busy."""
    busy, shares = [0] * processes, [0] * len(runs)
    for index in sorted(range(len(runs)), key=runs.__getitem__, reverse=True):
        shares[index] = min(range(processes), key=busy.__getitem__)
        busy[shares[index]] += runs[index]
    return shares
