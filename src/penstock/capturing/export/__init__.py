"""The chain of layers of any module, by ``torch.export``: traced, cut where little crosses, and checked.

May import the rest of ``capturing``. Start reading in ``tracing.py``.
"""
