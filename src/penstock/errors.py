"""Every error that Penstock raises on purpose.

    PenstockError
    ├── CaptureError      the model could not be turned into a chain of layers
    ├── ProfileError      a profile, its file or its measurement is wrong
    ├── PlanError         a plan or a cluster is wrong, or does not fit the model
    ├── ScheduleError     a schedule violates one of its rules
    ├── TransportError    a peer died, hung, or sent an unexpected message
    └── CheckpointError   a saved state does not fit this model or plan

A message says where, what was expected, what was found, and what to do.
"""

__all__ = [
    "CaptureError",
    "CheckpointError",
    "PenstockError",
    "PlanError",
    "ProfileError",
    "ScheduleError",
    "TransportError",
]


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class CaptureError(PenstockError):
    """The model could not be turned into a chain of layers."""


class ProfileError(PenstockError):
    """A profile, its file or its measurement is wrong."""


class PlanError(PenstockError):
    """A plan or a cluster is wrong, or does not fit the model."""


class ScheduleError(PenstockError):
    """A schedule violates one of its rules."""


class TransportError(PenstockError):
    """A peer died, hung, or sent an unexpected message."""


class CheckpointError(PenstockError):
    """A saved state does not fit this model or plan."""
