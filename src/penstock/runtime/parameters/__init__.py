"""Parameters: weight versions, optimizer steps, sums of gradients over replicas, and norms.

May import ``devices`` and ``transport``, and of the rest of Penstock ``capturing``, ``scheduling`` and ``training``.
Start reading in ``weights.py``. A correction of the optimizer's gradients is a hook in ``training/update_hooks.py``.
"""

__all__: list[str] = []
