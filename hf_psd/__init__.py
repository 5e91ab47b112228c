"""Lossless speculative decoding for whole batches behind `model.generate(..., assistant_models=[...], psd=True)`."""

from .api import PSDGenerationMixin, disable, enable, generate, last_stats
from .config import PSDConfig
from .drafters.base import Drafter
from .hooks import StepContext, StepHook, StepHookList
from .stats import PSDStats
from .workspace import release

__version__ = "0.1.0"
__all__ = [
    "Drafter",
    "PSDConfig",
    "PSDGenerationMixin",
    "PSDStats",
    "StepContext",
    "StepHook",
    "StepHookList",
    "disable",
    "enable",
    "generate",
    "last_stats",
    "release",
]

enable()
