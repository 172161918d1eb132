"""Capture: a model as a chain of layers with named values between them."""

from penstock.capturing.chain import Layer, LayerChain, StageModule
from penstock.capturing.doors import capture
from penstock.capturing.exported_cuts import megatron_layout, module_names
from penstock.capturing.model_forms import ModelInputs, ModelOutput
from penstock.capturing.randomness import microbatch_seed, seeded

__all__ = [
    "Layer",
    "LayerChain",
    "ModelInputs",
    "ModelOutput",
    "StageModule",
    "capture",
    "megatron_layout",
    "microbatch_seed",
    "module_names",
    "seeded",
]
