"""Rendering: schedules and timelines as text pictures, and plans as SVG pictures."""

from penstock.rendering.pictures import render
from penstock.rendering.plan_drawings import draw_plan

__all__ = ["draw_plan", "render"]
