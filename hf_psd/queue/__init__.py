"""Continuous batching: a queue of requests, each with settings of its own, over the one step loop."""

from .api import generate_batch
from .manager import ContinuousBatchingManager
from .metrics import QueueStats
from .results import Result

__all__ = ["ContinuousBatchingManager", "QueueStats", "Result", "generate_batch"]
