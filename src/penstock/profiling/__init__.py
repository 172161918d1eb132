"""Measuring: what each layer of a model costs on one device, and what the links between the ranks carry."""

from penstock.profiling.clocks import Clock, CudaClock, ScriptedClock, WallClock
from penstock.profiling.links import probe
from penstock.profiling.profiler import profile
from penstock.profiling.subjects import Subject

__all__ = ["Clock", "CudaClock", "ScriptedClock", "Subject", "WallClock", "probe", "profile"]
