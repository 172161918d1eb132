"""Jobs that are killed or stopped on purpose, and go on. Start reading in `kills.py`."""
