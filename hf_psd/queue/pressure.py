"""KV under pressure: what running requests may need next, and who gives way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..blocks import BlockPool
from ..phases import Phase, Request
from .ticket import Ticket


def reach(request: Request, drafts: int) -> int:
    """Positions that a verification with so many drafts may write, at most, by what the host knows."""
    return min(request.most + drafts, request.limit)


def headroom(tickets: Mapping[Request, Ticket], pool: BlockPool, gamma: int) -> int:
    """Blocks that the seated requests lack for one more verification each."""
    return sum(max(0, pool.need(reach(each, gamma)) - len(pool.owned[each.slot])) for each in tickets)


def victim(tickets: Mapping[Request, Ticket], request: Request, reading: Sequence[Ticket]) -> Ticket:
    """Who gives its blocks to `request`: the newest without a draft, else the newest with one, at worst itself.

    The oldest of all never gives way, so that somebody always gets on.
    """
    oldest = min(tickets, key=lambda each: each.index)
    others = [each for each in tickets if each is not request and each is not oldest]
    unarmed = [each for each in others if tickets[each] in reading or each.phase is Phase.NEEDS_DRAFT]
    newer = [each for each in others if each.index > request.index]
    candidates = unarmed or newer or [request]
    return tickets[max(candidates, key=lambda each: each.index)]
