"""Lossless speculative decoding for whole batches behind `model.generate(..., assistant_models=[...], psd=True)`."""

from .api import PSDGenerationMixin, disable, enable, generate, last_stats
from .config import PSDConfig
from .drafters.base import Drafter
from .explain import Explanation, explain
from .hooks import StepContext, StepHook, StepHookList
from .placement import Placement, place
from .queue import ContinuousBatchingManager, generate_batch
from .row_streaming import RowStreamer, RowTextStreamer
from .stats import PSDStats
from .timeline import Timeline
from .workspace import release

__version__ = "0.1.0"
__all__ = [
    "ContinuousBatchingManager",
    "Drafter",
    "Explanation",
    "PSDConfig",
    "PSDGenerationMixin",
    "PSDStats",
    "Placement",
    "RowStreamer",
    "RowTextStreamer",
    "StepContext",
    "StepHook",
    "StepHookList",
    "Timeline",
    "disable",
    "enable",
    "explain",
    "generate",
    "generate_batch",
    "last_stats",
    "place",
    "release",
]

enable()
