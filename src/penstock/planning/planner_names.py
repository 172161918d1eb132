"""The names of the planners that `penstock.plan` can ask; some are those of the schedule that the paper is about."""

from enum import StrEnum

__all__ = ["PlannerName"]


class PlannerName(StrEnum):
    """In the order in which planners are asked; `UNIFORM` is asked by name only."""

    PIPEDREAM = "pipedream"
    TWO_BW = "2bw"
    SPP = "spp"
    INTERLEAVED = "interleaved"
    UNIFORM = "uniform"
