"""The values that the rest of Penstock is built from; none of them imports torch."""

from penstock.scheduling.schedule_names import SCHEDULES
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.link_tables import LinkLevels, LinkMatrix
from penstock.values.plans import Plan, Prediction, Stage, schedule
from penstock.values.profiles import LayerProfile, Profile
from penstock.values.transformers import Transformer

__all__ = [
    "SCHEDULES",
    "Cluster",
    "DeviceKind",
    "LayerProfile",
    "LinkLevels",
    "LinkMatrix",
    "Plan",
    "Prediction",
    "Profile",
    "Stage",
    "Transformer",
    "schedule",
]
