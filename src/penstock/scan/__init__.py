"""Backward by parallel scan, for recurrences over long sequences and for chains of small layers (BPPSA).

The backward through n steps is a product of n Jacobians. The product is associative, so a parallel scan takes about
2 log2(n) steps where plain backpropagation takes n. Source: Wang, Bai and Pekhimenko, MLSys 2020.

May import ``errors``, ``arguments`` and ``torch_internals`` only, and no other room imports this one. Start reading in
``scans.py``.
"""

from penstock.scan.chains import ScanSequential
from penstock.scan.diagonal import DiagonalRecurrence, diagonal_recurrence
from penstock.scan.estimates import Estimate, Machine, ScanCounts, count, estimate
from penstock.scan.layers import ScanGRU, ScanLSTM, ScanRNN
from penstock.scan.scans import blelloch, chunked, hybrid, linear

__all__ = [
    "DiagonalRecurrence",
    "Estimate",
    "Machine",
    "ScanCounts",
    "ScanGRU",
    "ScanLSTM",
    "ScanRNN",
    "ScanSequential",
    "blelloch",
    "chunked",
    "count",
    "diagonal_recurrence",
    "estimate",
    "hybrid",
    "linear",
]
