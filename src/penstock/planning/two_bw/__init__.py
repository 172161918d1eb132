"""The planner of PipeDream-2BW: equal parallel pipelines of repeated blocks."""

from penstock.planning.two_bw.pipeline_searches import rank_pipelines

__all__ = ["rank_pipelines"]
