"""Rendering: schedules and timelines as text that people read at a glance, and plans as pictures."""

from penstock.rendering.pictures import render
from penstock.rendering.plan_drawings import draw_plan

__all__ = ["draw_plan", "render"]
