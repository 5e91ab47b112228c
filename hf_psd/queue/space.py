"""Device buffers of a queue: as a call's, but with KV in blocks, one pool per model."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..blocks import BlockPool
from ..cache import PagedCache
from ..graphs import StepGraphs
from ..runner import ModelRunner, input_device
from ..state import Limits
from ..workspace import Workspace

COLUMN_GRANULE = 256
TARGET = -1
"""Key of the target's pool; those of the drafters are their numbers."""


class PagedWorkspace(Workspace):
    """A `Workspace` whose requests own blocks instead of slots of fixed length.

    Args:
        model, limits, pad_id, graphs: as in `Workspace`.
        blocks: blocks of each model's pool.
        block_size: tokens per block.
    """

    def __init__(
        self, model: PreTrainedModel, limits: Limits, pad_id: int, graphs: bool, blocks: int, block_size: int
    ):
        self.blocks, self.block_size = blocks, block_size
        self.pools: dict[int, BlockPool] = {}
        self.limits = limits
        super().__init__(model, limits, pad_id, graphs)

    @property
    def pool(self) -> BlockPool:
        """The target's."""
        return self.pools[TARGET]

    def widen_for(self, limit: int) -> None:
        """Makes sure that a request can grow to `limit` tokens. If not so far, captured graphs are given up.

        The host waits for what is under way: it works on buffers that are about to be replaced.
        """
        if limit <= self.limits.columns:
            return
        columns = -(-max(limit, 2 * self.limits.columns) // COLUMN_GRANULE) * COLUMN_GRANULE
        self.limits = Limits(self.limits.slots, columns, self.limits.gamma)
        self.wait()
        with self.lane.work():
            self.state.widen(self.limits.capacity)
        self.lane.mark()
        for pool in self.pools.values():
            pool.widen(self.limits.capacity)
        for runner in [self.runner, *(known[1] for known in self._drafter_runners.values())]:
            runner.cache.capacity = self.pool.columns
        self.forget_graphs()

    def wait(self) -> None:
        """Lets the host wait for the work of all lanes."""
        for lane in (self.lane, *self._lanes.values()):
            lane.wait()

    def forget_graphs(self) -> None:
        """Captured graphs no longer fit the buffers."""
        self._graphs_away.clear()
        if self.graphs:
            self.verify_graphs = StepGraphs(self.lane, self.limits.slots - 1)
            self.draft_graphs = StepGraphs(self.draft_lane, self.limits.slots - 1)

    def release(self, slot: int) -> list[int]:
        """Takes back all that a request held; returns the target's blocks."""
        for key, pool in self.pools.items():
            if key != TARGET:
                pool.release(slot)
        return self.pool.release(slot)

    def trim(self, slot: int, target_tokens: int, drafter_tokens: int) -> None:
        """Takes back what a request does not need for its first so many positions."""
        for key, pool in self.pools.items():
            pool.trim(slot, target_tokens if key == TARGET else drafter_tokens)

    def scrub(self, blocks: list[int]) -> None:
        """See `PagedCache.scrub`; of the target."""
        assert isinstance(self.runner.cache, PagedCache)
        self.runner.cache.scrub(blocks)

    def _make_runner(self, model: PreTrainedModel, key: int | None) -> ModelRunner:
        pool = BlockPool(self.blocks, self.block_size, self.limits.slots, self.limits.capacity, input_device(model))
        self.pools[TARGET if key is None else key] = pool
        return ModelRunner(model, self.limits.slots, self.limits.capacity, pool)
