"""SPP's planner: microbatches split over replicas, devices in the order of minimum cuts; and its baselines."""

from penstock.planning.spp.stage_numbers import plan_spp, spp_candidates

__all__ = ["plan_spp", "spp_candidates"]
