"""Integrations: training loops of other libraries that train through a pipeline, and what language models need.

Each is imported on first use, with the library that it belongs to.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.integrations.language_models import generate, perplexity
    from penstock.integrations.lightning_module import PipelineModule, PipelineStrategy
    from penstock.integrations.transformers_trainer import PipelineTrainer

__all__ = ["PipelineModule", "PipelineStrategy", "PipelineTrainer", "generate", "perplexity"]

_FILES = {
    "PipelineModule": "lightning_module",
    "PipelineStrategy": "lightning_module",
    "PipelineTrainer": "transformers_trainer",
    "generate": "language_models",
    "perplexity": "language_models",
}


def __getattr__(name: str) -> object:
    if name not in _FILES:
        raise AttributeError(f"module 'penstock.integrations' has no attribute {name!r}")
    return getattr(import_module(f"penstock.integrations.{_FILES[name]}"), name)
