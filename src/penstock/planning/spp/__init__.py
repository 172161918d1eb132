"""SPP's planner: microbatches split over replicas, devices in the order of minimum cuts."""

from penstock.planning.spp.spp_search import plan_spp, spp_candidates

__all__ = ["plan_spp", "spp_candidates"]
