"""A layer out of a trace: a graph of PyTorch's operators and of blocks, and the Python that `torch.fx` makes of it."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode

__all__ = ["TracedLayer"]


class TracedLayer(GraphModule):
    """`graph` over `attributes`: tensors and modules, by the names that it gets them by."""

    def __init__(self, attributes: Mapping[str, Tensor | nn.Module], graph: Graph) -> None:
        super().__init__(dict(attributes), graph, "TracedLayer")

    def recompile(self) -> PythonCode:
        """Generates the code anew after the graph has changed."""
        code = super().recompile()
        # As other modules are called: a GraphModule's own call prints errors and cuts their tracebacks.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code
