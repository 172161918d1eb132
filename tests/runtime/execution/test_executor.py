"""What a stage holds between the forward and the backward of a microbatch."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from penstock.runtime.execution.executor import StageExecutor


@pytest.mark.parametrize("split", [False, True])
def test_an_output_is_free_when_its_message_is_gone(split: bool) -> None:
    executor, weight = StageExecutor(), torch.ones(3, 3, dtype=torch.float64).requires_grad_()
    received = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()

    (output,) = executor.forward(0, [received], lambda values: (values[0] @ weight,))
    gone, gradient = StorageWeakRef(output.untyped_storage()), torch.ones_like(output)  # type: ignore[no-untyped-call]
    del output
    assert gone.expired()  # type: ignore[no-untyped-call]
    (found,) = (executor.backward_input if split else executor.backward)(0, [gradient])
    if split:
        executor.backward_weight(0)
    assert found is not None and torch.equal(found, gradient @ weight.detach().t())
    assert weight.grad is not None and torch.equal(weight.grad, received.detach().t() @ gradient)
