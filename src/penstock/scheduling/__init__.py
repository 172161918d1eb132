"""Scheduling: what every rank does and in which order, as values, and the proof that it is right.

Public, beside `penstock` itself: what is needed to define a schedule of your own.
"""

from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Receive,
    Send,
    Update,
    format_programs,
    parse,
    parse_programs,
)
from penstock.scheduling.definitions import (
    Drain,
    Guarantees,
    PipelineShape,
    ScheduleDefinition,
    Segment,
    Step,
    VersionRule,
)
from penstock.scheduling.lowering import lower
from penstock.scheduling.orders import METHODS
from penstock.scheduling.placements import Placement, StageLayout
from penstock.scheduling.schedules import Programs, Schedule, inference
from penstock.scheduling.verification.verifier import Verification, verify, verify_programs
from penstock.scheduling.written_programs import define_by_programs

__all__ = [
    "METHODS",
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "Drain",
    "Forward",
    "Guarantees",
    "PipelineShape",
    "Placement",
    "Programs",
    "Receive",
    "Schedule",
    "ScheduleDefinition",
    "Segment",
    "Send",
    "StageLayout",
    "Step",
    "Update",
    "Verification",
    "VersionRule",
    "define_by_programs",
    "format_programs",
    "inference",
    "lower",
    "parse",
    "parse_programs",
    "verify",
    "verify_programs",
]
