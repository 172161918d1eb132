"""An observer of the waits of one process: it sees long waits and failures, and may explain them."""

from collections.abc import Sequence


class WaitObserver:
    """Sees what this process waits for. This one does nothing; the transport does not know what another one does."""

    def waiting(self, context: str, peers: Sequence[int]) -> None:
        """Called every fraction of a second while this process waits in `context` for one of `peers`."""

    def failing(self, reason: str) -> None:
        """Called when the pipeline of this process has failed. `reason`: the error and the place."""

    def explain(self) -> str:
        """Called before the error of a timeout is raised. Returns the end of its message; it may take seconds."""
        return ""
