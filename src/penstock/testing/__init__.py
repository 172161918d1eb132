"""What tests of a training need: faults that happen on purpose, at an exact place.

Start reading in `faults.py`. This room may import errors, the text of actions, and the engine, before whose actions
faults happen.
"""
