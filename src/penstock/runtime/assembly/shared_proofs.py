"""The proofs of a captured model, shared among the ranks.

A proof runs the model several times, and all ranks have captured the same one. So each proof is found by one rank, and
what it finds holds for all. Where ranks have captured different models, each proves its own.
"""

from collections.abc import Sequence

from penstock.capturing.chain import LayerChain
from penstock.capturing.proofs import UnprovedChain
from penstock.errors import CaptureError
from penstock.runtime.transport.collective_errors import agreed, gather_results
from penstock.runtime.transport.worlds import World

__all__ = ["prove"]


def prove(world: World, unproved: UnprovedChain, digest: str | None) -> LayerChain:
    """The chain after its proofs. `digest`: that of `unproved`, by `digest_of`. Collective.

    Raises `CaptureError` on every rank if the chain must not be used.
    """
    digests = world.gather(digest, "while they compared their captured models")
    if None in digests or len(set(digests)) > 1:
        with agreed(world, "while it checked its captured model"):
            return unproved.proved()
    shares = _shares([proof.runs for proof in unproved.proofs], world.processes)

    def find() -> list[bool | str]:
        found: list[bool | str] = []
        for index, rank in enumerate(shares):
            if rank == world.rank:
                try:
                    found.append(unproved.find(index))
                except CaptureError as error:
                    found.append(str(error))
        return found

    if not shares:
        return unproved.chain
    gathered = list(map(iter, gather_results(world, "while it checked the captured model", find)))
    verdicts = []
    for rank in shares:
        verdict = next(gathered[rank])
        if isinstance(verdict, str):
            raise CaptureError(verdict)
        verdicts.append(verdict)
    return unproved.concluded(verdicts)


def _shares(runs: Sequence[int], processes: int) -> list[int]:
    """The rank that finds each proof, of which `runs` says how long it takes: the longest first, to the least busy."""
    busy, shares = [0] * processes, [0] * len(runs)
    for index in sorted(range(len(runs)), key=runs.__getitem__, reverse=True):
        shares[index] = min(range(processes), key=busy.__getitem__)
        busy[shares[index]] += runs[index]
    return shares
