"""Measures the cost of each layer of a model on one device, and the links between the ranks."""

from penstock.profiling.clocks import Clock, CudaClock, ScriptedClock, WallClock
from penstock.profiling.devices import Subject
from penstock.profiling.links import probe
from penstock.profiling.profiler import profile

__all__ = ["Clock", "CudaClock", "ScriptedClock", "Subject", "WallClock", "probe", "profile"]
