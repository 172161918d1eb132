"""Parameters: weight versions, optimizer steps, sums of gradients over replicas, and norms.

May import ``devices`` and ``transport``, and of the rest of Penstock ``capturing``, ``scheduling`` and ``training``.
Start reading in ``weight_versions.py``. Corrections of the optimizer's steps are in ``training/update_corrections.py``.
"""
