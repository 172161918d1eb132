"""Training options: the loss, the optimizer, precision, clipping, scaling, hooks. What trains is ``runtime``."""
