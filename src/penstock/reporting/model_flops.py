"""The floating-point operations that the training of one sample takes, from the operators that capture counted."""

from penstock.capturing.chain import LayerChain

_FORWARDS_OF_A_STEP = 3
"""A backward takes twice the operations of its forward: one product for the gradient of each factor."""


def count_training_flops(chain: LayerChain) -> float | None:
    """Three times the operations of the forward, for one sample of the captured ones: without recomputation, without
    the loss, and without regard to weights that are not trained.

    A multiplication with an addition is two operations. None if no operator was counted.
    """
    operators = [operator for layer in chain.layers for operator in layer.operators]
    if not operators:
        return None
    return _FORWARDS_OF_A_STEP * sum(operator.flops for operator in operators) / chain.inputs.microbatch_size
