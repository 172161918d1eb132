"""Penstock: pipeline-parallel training for any PyTorch module.

The names in `__all__` are the whole public surface. They are loaded on first use, so that the pure half (values,
planning, schedules, simulation, pictures) can be imported on a machine without torch. A keyword that one of them does
not have is refused with the nearest one.
"""

import os
import sys
from importlib import import_module
from types import FunctionType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.capturing import capture
    from penstock.capturing.initialization import initialize, reset_parameters
    from penstock.capturing.weight_files import load_weights
    from penstock.data import loader, prefetch, shapes_of
    from penstock.errors import (
        CaptureError,
        CheckpointError,
        PenstockError,
        PlanError,
        ProfileError,
        RehearsalError,
        ScheduleError,
        TransportError,
    )
    from penstock.oracle.references import reference_train
    from penstock.packing import pack, packed_batch
    from penstock.pipeline import Pipeline
    from penstock.planning.cluster_comparisons import compare_clusters
    from penstock.planning.orders.order_plans import frontier
    from penstock.planning.planners import plan
    from penstock.profiling.devices import Subject
    from penstock.profiling.links import probe
    from penstock.profiling.profiler import profile
    from penstock.rehearsing import rehearse
    from penstock.rendering.pictures import render
    from penstock.reporting.stats import Stats, log_stats
    from penstock.runtime.checkpoints.checkpoint_reader import latest_checkpoint
    from penstock.runtime.devices.local_devices import local_device
    from penstock.scheduling.definitions import ScheduleDefinition
    from penstock.scheduling.schedules import Schedule
    from penstock.scheduling.verification.verifier import verify
    from penstock.simulating.simulator import simulate
    from penstock.timelines.timelines import Timeline
    from penstock.training.losses import Microbatches, model_loss, token_count
    from penstock.training.optimizers import NamedParameters
    from penstock.training.scaling import LossScale
    from penstock.training.update_corrections import UpdateHook, WeightAverage, WeightPrediction, WeightUpdate
    from penstock.training.wire_codecs import RowInt8, WireCodec
    from penstock.values.clusters import Cluster
    from penstock.values.device_kinds import DeviceKind
    from penstock.values.plans import Plan, Stage, schedule
    from penstock.values.profiles import LayerProfile, Profile
    from penstock.values.transformers import Transformer

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "DeviceKind",
    "LayerProfile",
    "LossScale",
    "Microbatches",
    "NamedParameters",
    "PenstockError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "RehearsalError",
    "RowInt8",
    "Schedule",
    "ScheduleDefinition",
    "ScheduleError",
    "Stage",
    "Stats",
    "Subject",
    "Timeline",
    "Transformer",
    "TransportError",
    "UpdateHook",
    "WeightAverage",
    "WeightPrediction",
    "WeightUpdate",
    "WireCodec",
    "capture",
    "compare_clusters",
    "frontier",
    "initialize",
    "latest_checkpoint",
    "load_weights",
    "loader",
    "local_device",
    "log_stats",
    "model_loss",
    "pack",
    "packed_batch",
    "plan",
    "prefetch",
    "probe",
    "profile",
    "reference_train",
    "rehearse",
    "render",
    "reset_parameters",
    "schedule",
    "shapes_of",
    "simulate",
    "token_count",
    "verify",
]

__version__ = "0.2.0"

_NAMES = {
    "capturing": "capture",
    "capturing.initialization": "initialize reset_parameters",
    "capturing.weight_files": "load_weights",
    "data": "loader prefetch shapes_of",
    "errors": "CaptureError CheckpointError PenstockError PlanError ProfileError RehearsalError ScheduleError "
    "TransportError",
    "oracle.references": "reference_train",
    "packing": "pack packed_batch",
    "pipeline": "Pipeline",
    "planning.cluster_comparisons": "compare_clusters",
    "planning.orders.order_plans": "frontier",
    "planning.planners": "plan",
    "profiling.links": "probe",
    "profiling.profiler": "profile",
    "profiling.devices": "Subject",
    "rehearsing": "rehearse",
    "rendering.pictures": "render",
    "reporting.stats": "Stats log_stats",
    "runtime.checkpoints.checkpoint_reader": "latest_checkpoint",
    "runtime.devices.local_devices": "local_device",
    "scheduling.definitions": "ScheduleDefinition",
    "scheduling.schedules": "Schedule",
    "scheduling.verification.verifier": "verify",
    "simulating.simulator": "simulate",
    "timelines.timelines": "Timeline",
    "training.losses": "Microbatches model_loss token_count",
    "training.optimizers": "NamedParameters",
    "training.scaling": "LossScale",
    "training.update_corrections": "UpdateHook WeightAverage WeightPrediction WeightUpdate",
    "training.wire_codecs": "RowInt8 WireCodec",
    "values.clusters": "Cluster",
    "values.device_kinds": "DeviceKind",
    "values.plans": "Plan Stage schedule",
    "values.profiles": "LayerProfile Profile",
    "values.transformers": "Transformer",
}
_VALUES = ("model_loss", "reset_parameters", "token_count")
"""Functions that are passed on more often than called, and compared."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def _show_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Where several processes have not met, or no longer, one tells an error, and the others a line each."""
    if not import_module("penstock.runtime.collectives.one_screen").show_alone(error):
        sys.__excepthook__(kind, error, trace)


def __getattr__(name: str) -> object:
    if name == "integrations":
        return import_module("penstock.integrations")
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.{_HOMES[name]}"), name)
    from penstock.arguments import explained
    from penstock.runtime.devices.process_hooks import hooks_allowed

    if os.environ.get("WORLD_SIZE", "1") != "1" and sys.excepthook is sys.__excepthook__ and hooks_allowed():
        sys.excepthook = _show_uncaught
    if isinstance(value, FunctionType) and name not in _VALUES:
        value = explained(value)
    elif "__init__" in vars(value) and not issubclass(value, Exception):
        value.__init__ = explained(value.__init__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
