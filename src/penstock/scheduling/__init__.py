"""Scheduling: what every rank does and in which order, as values, and the proof that it is right."""

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
from penstock.scheduling.definitions import Drain, Guarantees, PipelineShape, ScheduleDefinition, Step, VersionRule
from penstock.scheduling.lowering import lower
from penstock.scheduling.orders import METHODS
from penstock.scheduling.schedules import Programs, Schedule, inference
from penstock.scheduling.verification.verifier import Verification, verify, verify_programs

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
    "Programs",
    "Receive",
    "Schedule",
    "ScheduleDefinition",
    "Send",
    "Step",
    "Update",
    "Verification",
    "VersionRule",
    "format_programs",
    "inference",
    "lower",
    "parse",
    "parse_programs",
    "verify",
    "verify_programs",
]
