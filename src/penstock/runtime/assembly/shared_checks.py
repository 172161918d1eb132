"""The checks of a captured model, which one rank makes for all.

A check runs the model several times, and all ranks have captured the same one. Ranks that have captured different
chains each check their own.
"""

from penstock.capturing.chain import LayerChain
from penstock.capturing.chain_checks import UncheckedChain
from penstock.capturing.chain_digests import digest_of
from penstock.errors import CaptureError
from penstock.runtime.transport.collective_errors import agreed, gather_results
from penstock.runtime.transport.worlds import World
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks


def check_together(world: World, unchecked: UncheckedChain) -> LayerChain:
    """The chain after its checks. Collective.

    Raises `CaptureError` on every rank if the chain must not be used.
    """
    with agreed(world, "while it captured the model"):
        digest = None if _runs_everywhere(unchecked) else digest_of(unchecked.chain)
    digests = world.gather(digest, "while they compared their captured models")
    if None in digests or len(set(digests)) > 1:
        with agreed(world, "while it checked its captured model"):
            return unchecked.checked()

    def run() -> list[bool] | str:
        if world.rank > 0:
            return []
        try:
            return unchecked.results()
        except CaptureError as error:
            return str(error)

    verdicts = gather_results(world, "while it checked the captured model", run)[0]
    if isinstance(verdicts, str):
        raise CaptureError(verdicts)
    return unchecked.after(verdicts)


def _runs_everywhere(unchecked: UncheckedChain) -> bool:
    """Whether every process has to run the checks: those of a model that waits for other processes in its forward, or
    might in the hooks of its parameters.
    """
    if unchecked.sampled is None:
        return False
    model = unchecked.sampled.model
    hooked = any(gradient_hooks(each) or accumulated_hooks(each) for each in model.parameters())
    return unchecked.communicates or hooked
