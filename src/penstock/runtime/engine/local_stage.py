"""The state and the tools that a rank holds for one stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.runtime.devices.streams import UpdateOrder
from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.weight_versions import VersionedWeights


@dataclass(slots=True, eq=False)
class LocalStage:
    """Holds the weights of one stage, and the objects that run its forwards and backwards."""

    weights: VersionedWeights
    evaluation: Callable[[], Callable[[Sequence[Tensor], Mapping[str, Tensor]], tuple[Tensor, ...]]]
    """Returns the stage in evaluation mode over the newest weights. The first call captures it."""
    ties: Mapping[int, tuple[str, ...]]
    """For every stage that shares weights with this one, the names of these weights."""
    reducer: Reducer | None = None
    """Sums gradients over the replicas of the stage; None if it has no other replica."""
    recomputes: Granularity | None = None
    """Whether a backward recomputes what it needs, and for how many layers at a time."""
    order: UpdateOrder | None = None
    """Orders its updates and the computations that read its weights, on a device that runs them concurrently."""
    executor: StageExecutor = field(default_factory=StageExecutor)

    def discard(self) -> None:
        """Drops the microbatches in flight and their gradients."""
        self.executor.in_flight.clear()
        if self.reducer is not None:
            self.reducer.discard()
        self.weights.discard()
