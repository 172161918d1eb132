"""PipeDream's planner: the fastest slowest stage, replicas in turn, memory inside the dynamic program."""

from penstock.planning.pipedream.partitions import noam, partition

__all__ = ["noam", "partition"]
