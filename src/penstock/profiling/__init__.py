"""Measuring: what each layer of a model costs on one device."""

from penstock.profiling.clocks import Clock, CudaClock, ScriptedClock, WallClock
from penstock.profiling.profiler import profile
from penstock.profiling.subjects import Subject

__all__ = ["Clock", "CudaClock", "ScriptedClock", "Subject", "WallClock", "profile"]
