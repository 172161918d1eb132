"""Rendering: schedules and timelines as text pictures, and plans and frontiers as SVG pictures."""

from penstock.rendering.frontier_drawings import draw_frontier
from penstock.rendering.pictures import render
from penstock.rendering.plan_drawings import draw_plan

__all__ = ["draw_frontier", "draw_plan", "render"]
