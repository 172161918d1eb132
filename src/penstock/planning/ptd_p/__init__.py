"""PTD-P: pipeline, tensor and data parallelism for a transformer."""

from penstock.planning.ptd_p.three_d import plan_three_d

__all__ = ["plan_three_d"]
