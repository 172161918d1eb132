"""Capture: a model as a chain of layers with named values between them."""

from penstock.capturing.chain import Layer, LayerChain, StageModule
from penstock.capturing.doors import capture
from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.capturing.randomness import microbatch_seed, seeded

__all__ = [
    "Layer",
    "LayerChain",
    "ModelInputs",
    "ModelOutput",
    "StageModule",
    "capture",
    "microbatch_seed",
    "seeded",
]
