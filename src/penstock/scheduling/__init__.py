"""Scheduling: the actions of every rank in their order, as values, and the proof that they are correct.

This module is public, beside `penstock` itself: it has the names that a schedule of your own needs.
"""

from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Fetch,
    Forward,
    Offload,
    Receive,
    Recompute,
    Release,
    Reload,
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
from penstock.scheduling.written_programs import define_by_programs, read_torch_csv, torch_csv

__all__ = [
    "METHODS",
    "Action",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Compute",
    "Drain",
    "Fetch",
    "Forward",
    "Guarantees",
    "Offload",
    "PipelineShape",
    "Placement",
    "Programs",
    "Receive",
    "Recompute",
    "Release",
    "Reload",
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
    "read_torch_csv",
    "torch_csv",
    "verify",
    "verify_programs",
]
