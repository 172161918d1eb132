"""SPP's planner: microbatches split over replicas, devices in the order of minimum cuts; and its baselines."""
