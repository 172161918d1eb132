"""What it costs to move a job: its data leaves a region, which the provider of the machines charges for."""

from collections.abc import Sequence

from penstock.fleet.kinds import Kind


def moving_cost(gigabytes: float, region: str, kind: Kind, kinds: Sequence[Kind]) -> float:
    """The price of moving so much data from `region` to that of `kind`: 0 if one of them is not known. `kinds`: those
    of the fleet; those of `region` say what leaving it costs.
    """
    if not gigabytes or not region or not kind.region or region == kind.region:
        return 0.0
    return gigabytes * max((found.egress_per_gigabyte for found in kinds if found.region == region), default=0.0)
