"""The planner of PipeDream-2BW: equal parallel pipelines of repeated blocks."""

from penstock.planning.two_bw.pipeline_searches import plan_two_bw, rank_pipelines

__all__ = ["plan_two_bw", "rank_pipelines"]
