"""Rendering: schedules and timelines as text that people read at a glance."""

from penstock.rendering.pictures import render

__all__ = ["render"]
