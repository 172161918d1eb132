"""Models by hand, with the habits of their authors: state, hooks, control flow, random numbers, containers.

A family is a kind of habit. `Stack` has blocks of one kind between two linear layers, and a connection over all of
them, so that something of the model is in no block.
"""

from model_cases.habit_blocks import CASES as BLOCKS
from model_cases.habit_models import CASES as MODELS

__all__ = ["CASES"]

CASES = (*BLOCKS, *MODELS)
