"""What a user brings to training beside the model: the loss, the optimizer. Runtime and oracle read it alike."""

__all__: list[str] = []
