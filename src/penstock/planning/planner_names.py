"""The names of the planners of `penstock.plan`; some planners have the name of a schedule from the same paper."""

from enum import StrEnum


class PlannerName(StrEnum):
    """Lists the planners in the order in which they run; `UNIFORM` and `ORDER` run only if they are named, and `TWO_BW`
    also where `PIPEDREAM` would take too long."""

    PIPEDREAM = "pipedream"
    TWO_BW = "2bw"
    SPP = "spp"
    INTERLEAVED = "interleaved"
    UNIFORM = "uniform"
    ORDER = "order"
    """The stages of the other planners, and an order that is found for them."""
