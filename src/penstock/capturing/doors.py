"""The front doors of capture: which way a model is taken apart.

nn.Sequential (without hooks)    its children, run as they are
a list, tuple or ModuleList      the user's own layers, run as they are
any other nn.Module              traced with torch.export and cut between its own blocks
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.arguments import integer
from penstock.capturing.chain import LayerChain
from penstock.capturing.drafts import Draft, without_garbage_collection
from penstock.capturing.model_kinds import check_model
from penstock.capturing.samples import read_sample
from penstock.capturing.sequential import capture_list, capture_sequential, is_plain_sequential
from penstock.errors import CaptureError


def capture(
    model: nn.Module | Sequence[nn.Module | Callable[..., Any]],
    sample: tuple[Any, ...] | Mapping[str, Any] | Tensor,
    *,
    microbatch_size: int | None = None,
    check: bool = True,
) -> LayerChain:
    """`model` as a chain of layers, in the mode (training or evaluation) that it is in.

    model: an `nn.Sequential`; or a list, tuple or `nn.ModuleList` of layers, where each takes what the one before
        returned (a tuple or list as positional arguments, a dict as keywords, anything else as the single argument);
        or any other module.
    sample: the arguments of one call, as a tuple (positional) or a dict (keywords). What is not a tensor in it is a
        constant of the capture.
    microbatch_size: samples in `sample`; by default dimension 0 of its first tensor that has dimensions. Tensors with
        this size in dimension 0 are split into microbatches, the others go whole to every microbatch.
    check: whether a traced model is compared with the chain on the sample, outputs and gradients.

    The model's training flags, buffers and the random generators are left as they were.
    Raises `CaptureError` with the line of the model's code that stands in the way.
    """
    return draft(model, sample, microbatch_size=microbatch_size, check=check).alone()


def draft(
    model: nn.Module | Sequence[nn.Module | Callable[..., Any]],
    sample: tuple[Any, ...] | Mapping[str, Any] | Tensor,
    *,
    microbatch_size: int | None = None,
    check: bool = True,
) -> Draft:
    """What `capture` makes before it compares the trace with the model."""
    check_model(model)
    microbatch_size = integer(1).optional.check("capture(microbatch_size=)", microbatch_size, CaptureError)
    call, inputs = read_sample(sample, microbatch_size)
    with without_garbage_collection():
        match model:
            case nn.ModuleList() | list() | tuple():
                return Draft(capture_list(list(model), call, inputs))
            case nn.Sequential() if is_plain_sequential(model):
                return Draft(capture_sequential(model, call, inputs))
            case nn.Module():
                # It takes long to import, with the compiler of PyTorch.
                from penstock.capturing.export.exported import draft_exported

                return draft_exported(model, call, inputs, check)
            case _:
                raise AssertionError("check_model refuses anything else")
