"""What a drafter is: proposes tokens, is told what was accepted, never touches a model's weights or state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from ..phases import Request
from ..reviews import Review
from ..runner import Rows
from ..state import Limits, View
from ..verify.sampler import Sampler
from ..workspace import Workspace


@dataclass(frozen=True)
class Proposal:
    """Drafts for R requests.

    Attributes:
        ids: [R, gamma] int64, -1 after a row's last draft (a row may have none).
        scores: [R, gamma, V] fp32 processed scores each id was sampled from (V: the target's vocabulary), or None when
            the ids carry probability 1 (`point_mass`) or no scores are needed (greedy and coupled verification).
        point_mass: True if the ids are a deterministic function of the committed tokens.
        failed: [R] bool, rows where the drafter's model gave NaN; None if it cannot.
        review: what committed tokens looked like to the drafter, where that was asked for.
    """

    ids: torch.Tensor
    scores: torch.Tensor | None = None
    point_mass: bool = False
    failed: torch.Tensor | None = None
    review: Review | None = None

    def check(self, rows: int, session: Session) -> None:
        """Raises a `ValueError` for what verification could not use; values are not looked at."""
        gamma, vocab = session.limits.gamma, session.vocab_size
        if self.ids.shape != (rows, gamma) or self.ids.dtype != torch.long:
            raise ValueError(f"ids must be int64 [{rows}, {gamma}], got {self.ids.dtype} {list(self.ids.shape)}")
        if self.scores is not None and self.scores.shape != (rows, gamma, vocab):
            raise ValueError(f"scores must be [{rows}, {gamma}, {vocab}], got {list(self.scores.shape)}")
        if self.failed is not None and self.failed.shape != (rows,):
            raise ValueError(f"failed must be [{rows}], got {list(self.failed.shape)}")
        if session.sampler.needs_scores and self.scores is None and not self.point_mass:
            raise ValueError("drafts of rejection sampling need the scores they were sampled from, or point_mass")


@dataclass(frozen=True)
class Task:
    """One turn of drafting for a group.

    Attributes:
        view: the group's device state, on the drafter's device.
        requests: the same rows as the host knows them.
        budgets: drafts asked for, per row, each 0 .. gamma.
        review: rows of which committed tokens shall be reviewed although they have no budget (those with one are
            reviewed as well); None if nothing shall be reviewed.
    """

    view: View
    requests: Sequence[Request]
    budgets: Sequence[int]
    review: Sequence[bool] | None = None


@dataclass(frozen=True)
class Shape:
    """What fixes the launches of a draft turn.

    Attributes:
        budgets: drafts per row after clipping.
        width: committed tokens the first forward feeds per row.
        depth: forwards in the chain.
        bound: an upper bound of the rows' lengths.
    """

    budgets: list[int]
    width: int = 1
    depth: int = 0
    bound: int = 0


@dataclass(frozen=True)
class Outcome:
    """A verification as drafters see it, on the target's device.

    Attributes:
        view: the group *after* the commit.
        accepted: [R] int64, drafts accepted.
        hidden_states: the target's hidden states of the verified block, a tuple over layers of [R, T, H], for drafters
            with `needs_hidden_states`; else None. Position 0 belongs to the last token committed before the drafts.
    """

    view: View
    accepted: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None = None


@dataclass(frozen=True)
class Session:
    """What a drafter may know about the call it serves.

    Attributes:
        space: the call's device buffers; `space.scratch` keeps a drafter's own between calls.
        sampler: draws draft tokens so that the verification law holds.
        vocab_size: width of the target's logits.
        law: a key of all that the sampler's behaviour depends on, the seed apart.
        warn: says something to the user once per call.
        reviewing: drafters are to review committed tokens, see `Task.review` and `Drafter.review`.
    """

    space: Workspace
    sampler: Sampler
    vocab_size: int
    law: Hashable
    warn: Callable[[str], None]
    reviewing: bool = False

    @property
    def limits(self) -> Limits:
        """Sizes of the call."""
        return self.space.limits

    @property
    def device(self) -> torch.device:
        """The target's device."""
        return self.space.runner.device


class Drafter:
    """Base class of all drafters; subclasses override `draft` and whatever else they need.

    Attributes:
        name: shown in statistics.
        device: where `draft` runs; None means the target's device.
        needs_hidden_states: `commit` gets the target's hidden states (feature-level heads such as EAGLE or Medusa).
        draft_ahead: `ahead` is called while the rows are being verified (pre-verification as in PEARL).
        announces: `announce` tells how many drafts it has for a row's next turn before it is asked.
        reviews: it can tell how well it would have guessed committed tokens, by `review` or with its drafts.
        capturable: its work on the device can be captured in a CUDA graph: it has `prepare` and `propose` (and, if it
            reviews with its drafts, `review_idle` and `reviewed`), and on the device these, `review`, `commit` and
            `announce` touch nothing but buffers kept in `Session.space`.
        forwards: model forwards of this call so far.
        catch_up_forwards: those of them that read what the drafter had missed, prompts included, before it drafted.
        review_forwards: those of them that reviewed rows which others drafted for.
    """

    name = "drafter"
    device: torch.device | None = None
    needs_hidden_states = False
    draft_ahead = False
    announces = False
    reviews = False
    capturable = False
    forwards = 0
    catch_up_forwards = 0
    review_forwards = 0

    @property
    def signature(self) -> Hashable:
        """What its captured work depends on, beside the session."""
        return self.name

    def start(self, session: Session) -> None:
        """A call begins."""

    def prefill(self, view: View) -> None:
        """The prompts are known; a drafter may read them now or when it first drafts.

        In a queue it is called for each set of newcomers, whose slots may have been others' before.
        """

    def feed(self, rows: Rows, ids: torch.Tensor, positions: torch.Tensor, bound: int) -> None:
        """A piece of newcomers' text, in a queue: a drafter with KV may store it now instead of when it is asked.

        Args:
            rows: the newcomers.
            ids, positions: [R, T] int64 on the drafter's device; a negative position marks a token to skip.
            bound: an upper bound of the positions.
        """

    def draft(self, task: Task) -> Proposal:
        """Proposes up to `task.budgets` tokens per row, which may be fewer (a ragged budget)."""
        raise NotImplementedError

    def prepare(
        self, requests: Sequence[Request], budgets: Sequence[int], view_of: Callable[[list[int]], View]
    ) -> Shape:
        """The host's part of drafting: clips budgets, may run forwards that are due first, fixes the shape of the
        rest.

        `view_of` gathers the state of some of the rows, named by their place in `requests`.
        """
        raise NotImplementedError

    def propose(self, view: View, budget: torch.Tensor, shape: Shape) -> Proposal:
        """The device's part: up to `budget` [R] int64 drafts per row. Depends on `shape` and device state alone."""
        raise NotImplementedError

    def review_idle(self, requests: Sequence[Request], view_of: Callable[[list[int]], View]) -> None:
        """The host's part of reviewing rows that others draft for; runs before `prepare` and may run forwards.

        `view_of` gathers the state of some of the rows, named by their place in `requests`.
        """

    def reviewed(self, rows: Rows) -> Review | None:
        """The device's part of a review: what `review_idle`, `prepare` and `propose` have found about the rows since
        the last call of this; None if it does not review with its drafts."""
        return None

    def ahead(self, view: View, draft_ids: torch.Tensor) -> None:
        """Rows of `view` with drafts [R, T - 1] (-1: none) are being verified; `draft` may build on them later."""

    def review(self, outcome: Outcome) -> Review | None:
        """What the drafts it had for the rows, asked for or not, were worth in view of what was committed; None if it
        cannot tell or tells with its drafts. Runs before `commit`, on the target's lane, if `Session.reviewing`."""
        return None

    def commit(self, outcome: Outcome) -> None:
        """Tokens were committed. Runs on the target's lane, for all rows verified, also those others drafted for."""

    def announce(self, view: View) -> torch.Tensor:
        """[R] int64, drafts this drafter will have for each row's next turn. Runs after `commit`."""
        raise NotImplementedError

    def end(self) -> None:
        """The call is over, also after an error; drop every reference to its tensors."""
