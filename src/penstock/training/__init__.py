"""Training options: the loss, the optimizer, precision, clipping, scaling, hooks. Runtime and oracle share them."""
