"""What a rank holds of one stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from penstock.runtime.devices.streams import UpdateOrder
from penstock.runtime.execution.cuda_graphs import CudaGraphStage
from penstock.runtime.execution.executor import StageExecutor
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.weight_versions import VersionedWeights

__all__ = ["LocalStage"]


@dataclass(slots=True, eq=False)
class LocalStage:
    """Its weights, and what makes outputs and gradients of them."""

    weights: VersionedWeights
    evaluation: Callable[[], Callable[[Sequence[Tensor], Mapping[str, Tensor]], tuple[Tensor, ...]]]
    """The stage in evaluation mode over the newest weights. Captured on the first call."""
    ties: Mapping[int, tuple[str, ...]]
    """For every stage that shares weights with this one, the names of these weights."""
    reducer: Reducer | None = None
    """Sums gradients over the replicas of the stage; None if there is one only."""
    recomputes: Granularity | None = None
    """Whether what a backward needs is computed again then, and for how many layers at a time."""
    order: UpdateOrder | None = None
    """Between its updates and what computes with it, on a device that does several things at a time."""
    replays: CudaGraphStage | None = None
    """Its forwards and backwards as recordings, if they are to be."""
    executor: StageExecutor = field(default_factory=StageExecutor)
