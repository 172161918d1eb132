"""SPP's planner: microbatches split over replicas, devices in the order of minimum cuts.

Start reading in ``spp_search.py``.
"""
