"""Measures the cost of each layer of a model on one device, and the links between the ranks."""

from penstock.profiling.clocks import Clock, CudaClock, ScriptedClock, WallClock
from penstock.profiling.links import probe
from penstock.profiling.profiler import profile
from penstock.profiling.subjects import Subject

__all__ = ["Clock", "CudaClock", "ScriptedClock", "Subject", "WallClock", "probe", "profile"]
