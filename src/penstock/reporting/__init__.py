"""Numbers about a training for people and their tools: its speed, utilization and memory, and where to log them.

Start reading in `stats.py`. This room may import values, schedules, the simulator, captured models, and what the engine
has measured.
"""
