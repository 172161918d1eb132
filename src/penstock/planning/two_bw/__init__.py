"""The planner of PipeDream-2BW: equal parallel pipelines of repeated blocks."""
