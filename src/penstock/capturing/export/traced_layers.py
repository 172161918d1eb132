"""A layer out of a trace: a graph of PyTorch's operators and of blocks, and the Python that `torch.fx` makes of it."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.graph import PythonCode

from penstock.errors import CaptureError


class TracedLayer(GraphModule):
    """`graph` over `attributes`: tensors and modules, by the names that it gets them by."""

    def __init__(self, attributes: Mapping[str, Tensor | nn.Module], graph: Graph) -> None:
        _check_names(graph)
        super().__init__(dict(attributes), graph, "TracedLayer")

    def recompile(self) -> PythonCode:
        """Generates the code anew after the graph has changed."""
        code = super().recompile()
        # As other modules are called: a GraphModule's own call prints errors and cuts their tracebacks.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code


def _check_names(graph: Graph) -> None:
    """Raises `CaptureError` for a name that would end the text that it is in: torch.fx writes names into code as they
    are.
    """
    for node in graph.nodes:
        name = str(node.target)
        if node.op in ("get_attr", "call_module") and set(name) & set('"\\\n\r\0'):
            raise CaptureError(
                f"the parameter, buffer or module {name!r}: expected a name without double quotes, backslashes and "
                "ends of lines, since the code between the model's blocks is written anew as Python. Rename it, "
                "or pass the model as a list of layers"
            )
