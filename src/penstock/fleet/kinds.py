"""The machines of a fleet: kinds of devices, how many there are, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.arguments import FLAG, TEXT, check_fields, integer, number
from penstock.errors import PlanError

_RULES = {
    "name": TEXT.but("give the kind's name"),
    "workers": integer(1, unit="workers").but("give the number of devices of this kind"),
    "price_per_hour": number(0).but("give what one device costs for an hour, or 0"),
    "workers_per_server": integer(1, unit="workers").but("give the devices of one server, or leave it out").optional,
    "pool": TEXT.but("give the name of the kind whose devices these are"),
    "consolidated": FLAG,
    "region": TEXT.but("give the name of the place where these machines are, or leave it out"),
    "egress_per_gigabyte": number(0).but("give what a gigabyte costs that leaves the region, or leave it out"),
    "preempted_every_seconds": number(above=0, unit="seconds")
    .but("give the mean time until a spot device is taken away, or leave it out")
    .optional,
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Devices of one kind, each of which is a worker.

    Kinds with the same `pool` are the same devices, used in different ways: jobs that need one server and jobs that may
    be spread, say. They share one number of workers.
    """

    name: str
    workers: int
    price_per_hour: float = 0.0
    """What one device costs while a job has it."""
    workers_per_server: int | None = None
    """None if the devices are all alike in their distance."""
    pool: str = ""
    """Empty if no other kind has the same devices."""
    consolidated: bool = False
    """Whether the workers of a job must be on as few servers as possible."""
    region: str = ""
    """Where these machines are. Empty if moving to them costs nothing."""
    egress_per_gigabyte: float = 0.0
    """What a gigabyte costs that leaves the region."""
    preempted_every_seconds: float | None = None
    """The mean time until a device is taken away, as spot machines are. It is back in the next round. None: never."""

    def __post_init__(self) -> None:
        check_fields(self, _RULES, PlanError, f" in kind {self.name!r}")

    @property
    def devices(self) -> str:
        """The name of its devices: that of the pool, or its own."""
        return self.pool or self.name


def moving_cost(gigabytes: float, region: str, kind: Kind, kinds: Sequence[Kind]) -> float:
    """The price of moving so much data from `region` to that of `kind`: 0 if one of them is not known. `kinds`: those
    of the fleet; those of `region` say what leaving it costs.
    """
    if not gigabytes or not region or not kind.region or region == kind.region:
        return 0.0
    return gigabytes * max((found.egress_per_gigabyte for found in kinds if found.region == region), default=0.0)
