"""What all shipped selectors share."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

from . import state
from .checks import check_arm, check_fraction, check_integer, check_number, check_rate
from .context import check_context
from .reward import REWARDS
from .switching import Switching
from .table import NO_ARM, Table
from .tally import Entry, Tally

TableT = TypeVar("TableT", bound=Table)


class BaseSelector(Generic[TableT]):
    """Bookkeeping of pulls in flight, contexts, switches, retired arms, statistics and saved state.

    Each context has statistics of its own. Several pulls may be in flight, and their updates may come in any order.
    A selector draws from a `random.Random` of its own, so the global generators are neither read nor advanced.
    It takes no locks: one thread at a time.

    Args:
        n_arms: number of arms, at least 1; arms are called 0 .. n_arms - 1 and keep their number for good.
        seed: makes all choices reproducible; None draws one from the operating system.
        reward: "acceptance": rewards lie in [0, 1] and weights are numbers of trials (drafted tokens). "goodput":
            rewards are any finite numbers >= 0 (tokens per second), divided by `headroom` times the context's current
            best, and weights are seconds. `Table.evidence` says what a round counts as evidence.
        min_dwell: an arm is kept for at least this many selections in a row.
        hysteresis: an arm other than the current one is scored this much lower, on the [0, 1] scale.
        switch_cost: what changing to an arm costs, in rewards of one round on the [0, 1] scale, for all arms or per
            arm; spread over `min_dwell` rounds it is taken off the score of all arms but the current one.
        burn_in: observations of each arm, in each context, that are not learned from, because a graph capture or a
            compilation may sit in them. Default: 1 under "goodput", 0 under "acceptance".
        fading: factor per round by which the best goodput fades until it is reached again.

    Raises:
        ValueError: an argument out of range; the message says what is allowed.
    """

    name: ClassVar[str] = ""
    full_information: ClassVar[bool] = False
    """Whether the selector is made for `update_all`; all selectors accept it."""

    table_kind: ClassVar[type[Table]] = Table
    headroom: ClassVar[float] = 1.25
    """Under "goodput" the current best counts as 1 / headroom: an arm of which little is known may be better."""

    def __init__(
        self,
        n_arms: int,
        seed: int | None = None,
        *,
        reward: str = "acceptance",
        min_dwell: int = 1,
        hysteresis: float = 0.0,
        switch_cost: float | Sequence[float] = 0.0,
        burn_in: int | None = None,
        fading: float = 0.999,
    ) -> None:
        if reward not in REWARDS:
            raise ValueError(f"reward={reward!r}: allowed are {', '.join(map(repr, REWARDS))}.")
        if check_number("fading", fading, 0.0, 1.0) == 0.0:
            raise ValueError(f"fading={fading}: allowed is 0 < fading <= 1.")
        if seed is not None and not isinstance(seed, int):
            raise ValueError(f"seed={seed!r}: allowed are an integer and None.")
        self.seed = seed
        self.reward = reward
        self.burn_in = int(reward == "goodput") if burn_in is None else check_integer("burn_in", burn_in, 0)
        self.fading = fading
        self._first_arms = self.n_arms = check_integer("n_arms", n_arms, 1)
        self._switching = Switching(n_arms, min_dwell, hysteresis, switch_cost)
        self._check_reward = check_fraction if reward == "acceptance" else check_rate
        self._active = list(range(n_arms))
        self._start_over()

    @property
    def active_arms(self) -> list[int]:
        return list(self._active)

    def select(self, context: Hashable = None) -> int:
        """Choose the arm of the next round, which is in flight from now on until `update` or `cancel`.

        Raises:
            RuntimeError: every arm is retired.
        """
        table = self._table(context)
        arm = table.incumbent
        if table.dwell >= self._switching.min_dwell or arm == NO_ARM or arm not in self._active:
            if not self._active:
                raise RuntimeError(f"all {self.n_arms} arms are retired; add_arm() gives a new one.")
            arm = self._decide(table)
            if arm != table.incumbent:
                if table.incumbent != NO_ARM:
                    table.switches += 1
                    table.switching_paid += self._switching.costs[arm]
                table.incumbent = arm
                table.dwell = 0
        table.dwell += 1
        table.pulls[arm] += 1
        table.in_flight[arm] += 1
        self._launched(table, arm)
        return arm

    def update(self, arm: int, reward: float, weight: float = 1.0, context: Hashable = None) -> None:
        """Tell what a pull of `arm` yielded: of one in flight if there is any, else of one that nobody selected.

        Args:
            reward: in [0, 1], or any finite number >= 0 under reward="goodput".
            weight: number of trials behind `reward` (or its seconds), so that means are ratios of sums; with 0 the
                pull has landed and taught nothing.
        """
        arm = check_arm(arm, self.n_arms)
        reward, weight = self._check_reward(reward), check_number("weight", weight, 0.0)
        table = self._table(context)
        self._landed(table, arm)
        if weight == 0.0:
            return
        if table.held_back[arm] < self.burn_in:
            table.held_back[arm] += 1
            return
        self._follow_best(table, reward)
        table.own_weight[arm] += weight
        table.record(arm, reward, weight)
        self._learn(table, arm, reward, weight)

    def update_many(
        self,
        arms: Sequence[int],
        rewards: Sequence[float],
        weights: Sequence[float] | None = None,
        contexts: Sequence[Hashable] | None = None,
    ) -> None:
        """One `update` per request; all arguments have one entry per request."""
        weights = [1.0] * len(arms) if weights is None else weights
        contexts = [None] * len(arms) if contexts is None else contexts
        if not len(arms) == len(rewards) == len(weights) == len(contexts):
            lengths = (len(arms), len(rewards), len(weights), len(contexts))
            raise ValueError(f"arms, rewards, weights, contexts have lengths {lengths}; they must be equal.")
        checked = [(check_arm(a, self.n_arms), self._check_reward(r)) for a, r in zip(arms, rewards, strict=True)]
        for weight, context in zip(weights, contexts, strict=True):
            check_number("weight", weight, 0.0)
            check_context(context)
        for (arm, reward), weight, context in zip(checked, weights, contexts, strict=True):
            self.update(arm, reward, weight, context)

    def update_all(
        self,
        rewards: Sequence[float | None],
        weight: float = 1.0,
        context: Hashable = None,
        arm: int | None = None,
    ) -> None:
        """Full information: what each arm would have yielded in one round.

        Args:
            rewards: one per arm, retired ones included; None where an arm was not scored.
            arm: the arm that was pulled in that round, None if the round belongs to no pull. Burn-in does not apply.
        """
        if len(rewards) != self.n_arms:
            raise ValueError(f"{len(rewards)} rewards for {self.n_arms} arms: one per arm, None where not scored.")
        checked = [None if reward is None else self._check_reward(reward) for reward in rewards]
        weight = check_number("weight", weight, 0.0)
        arm = None if arm is None else check_arm(arm, self.n_arms)
        table = self._table(context)
        if arm is not None:
            self._landed(table, arm)
        entries = [(k, reward, weight) for k, reward in enumerate(checked) if reward is not None]
        if weight == 0.0 or not entries:
            return
        if arm is not None and checked[arm] is not None:
            table.own_weight[arm] += weight
        self._follow_best(table, max(reward for _, reward, _ in entries))
        table.record_round(entries)
        self._learn_all(table, entries)

    def cancel(self, arm: int, context: Hashable = None) -> None:
        """Take back a pull in flight whose round will never report."""
        arm = check_arm(arm, self.n_arms)
        table = self._table(context)
        if table.in_flight[arm] == 0:
            raise ValueError(f"arm {arm} has no pull in flight in context {context!r}.")
        self._landed(table, arm)
        table.pulls[arm] -= 1

    @property
    def contexts(self) -> list[Hashable]:
        """Contexts that have statistics."""
        return list(self._tables)

    def forget(self, context: Hashable = None) -> None:
        """Drop all that is known of a context, its pulls in flight included."""
        self._tables.pop(check_context(context), None)

    def add_arm(self) -> int:
        """Add an arm to every context and return its number."""
        arm = self.n_arms
        self.n_arms += 1
        self._switching.resize(self.n_arms)
        self._active.append(arm)
        for table in self._tables.values():
            table.add_arm()
            self._seat_newcomer(table)
        return arm

    def retire(self, arm: int) -> None:
        """Never select `arm` again; its pulls in flight may still land."""
        arm = check_arm(arm, self.n_arms)
        if arm in self._active:
            self._active.remove(arm)

    def revive(self, arm: int) -> None:
        """Undo `retire`: the arm may be selected again, with what was learned of it."""
        arm = check_arm(arm, self.n_arms)
        if arm not in self._active:
            self._active = sorted([*self._active, arm])

    def reset(self) -> None:
        """Back to the state after construction, the seed included."""
        self.n_arms = self._first_arms
        self._switching.resize(self.n_arms)
        self._active = list(range(self.n_arms))
        self._start_over()

    def set_switch_cost(self, switch_cost: float | Sequence[float]) -> None:
        """Replace the switching cost, one number for all arms or one per arm (see the class)."""
        self._switching.set_costs(switch_cost)

    def stats(self) -> dict[str, Any]:
        """Counts and means, in total and per context, ready for JSON.

        `pulls`, `in_flight` and `means` (None where unknown) are per arm; a mean is over all time and in the unit of
        the rewards told. `regret` is the reward times weight (accepted tokens under "acceptance", tokens under
        "goodput") lost to the best fixed arm of each context, by the means known so far.
        """
        return state.summary(self, self._tables)

    def state_dict(self) -> dict[str, Any]:
        """All state, pulls in flight and the generator included, as JSON values."""
        return state.dump(self, self._tables)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken; nothing changes if it is refused.

        Raises:
            ValueError: the state is of another selector, of other options, or malformed.
        """
        state.load(self, state_dict)

    def options(self) -> dict[str, Any]:
        """Constructor options that a saved state must agree with."""
        switching = {"min_dwell": self._switching.min_dwell, "hysteresis": self._switching.hysteresis}
        return {"reward": self.reward, "burn_in": self.burn_in, "fading": self.fading, **switching}

    def __repr__(self) -> str:
        inner = ", ".join(f"{key}={value!r}" for key, value in self.options().items())
        return f"{type(self).__name__}(n_arms={self.n_arms}, seed={self.seed}, {inner})"

    def _decide(self, table: TableT) -> int:
        raise NotImplementedError

    def _learn(self, table: TableT, arm: int, reward: float, weight: float) -> None:
        """Hook: beyond the tally, which has the observation already."""

    def _learn_all(self, table: TableT, entries: list[Entry]) -> None:
        """Hook: the same for a round of full information."""

    def _seat_newcomer(self, table: TableT) -> None:
        """Hook: an arm was added to `table`."""

    def _launched(self, table: TableT, arm: int) -> None:
        """Hook: a pull of `arm` has begun."""

    def _landed(self, table: TableT, arm: int) -> None:
        if table.in_flight[arm] > 0:
            table.in_flight[arm] -= 1

    def _new_tally(self, n_arms: int) -> Tally | None:
        """The sums to decide by; None means the all-time ledger."""
        return None

    def _open_table(self, n_arms: int) -> TableT:
        ledger = Tally(n_arms)
        tally = self._new_tally(n_arms) or ledger
        return cast(TableT, self.table_kind(n_arms, tally, ledger, self.reward == "acceptance"))

    def _table(self, context: Hashable) -> TableT:
        try:
            table = self._tables.get(context)
        except TypeError:
            table = None
        if table is None:
            table = self._tables[check_context(context)] = self._open_table(self.n_arms)
        return table

    def _start_over(self) -> None:
        self._tables: dict[Hashable, TableT] = {}
        # A text seed keeps this stream apart from a Random(seed) of the caller's, which may produce the rewards.
        self._rng = random.Random() if self.seed is None else random.Random(f"hf_psd.bandit {self.name} {self.seed}")

    def _pick(self, table: TableT, scores: list[float]) -> int:
        """The active arm of the highest score (`scores` go by active arms), ties broken evenly at random."""
        handicap = self._switching.handicap
        if handicap is not None and table.incumbent != NO_ARM:
            pairs = zip(self._active, scores, strict=True)
            scores = [s if arm == table.incumbent else s - handicap[arm] for arm, s in pairs]
        top = max(scores)
        if scores.count(top) == 1:
            return self._active[scores.index(top)]
        return self._rng.choice([arm for arm, score in zip(self._active, scores, strict=True) if score == top])

    def _follow_best(self, table: TableT, reward: float) -> None:
        if self.reward == "goodput":
            table.unit = max(self.headroom * reward, table.unit * self.fading)
