"""Statistics and saved state of a selector, as JSON values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from .checks import check_number
from .context import check_context, context_from_json, context_to_json
from .table import Table
from .tally import integer

if TYPE_CHECKING:
    from .base import BaseSelector

VERSION = 1


def summary(selector: BaseSelector[Any], tables: Mapping[Hashable, Table]) -> dict[str, Any]:
    """What `BaseSelector.stats` returns."""
    active = selector.active_arms
    contexts = [(context_to_json(context), _table_summary(table, active)) for context, table in tables.items()]
    regrets = [part["regret"] for _, part in contexts if part["regret"] is not None]
    ledgers = [table.ledger for table in tables.values()]
    means = []
    for arm in range(selector.n_arms):
        weight = sum(ledger.weight[arm] for ledger in ledgers)
        means.append(sum(ledger.gain[arm] for ledger in ledgers) / weight if weight > 0.0 else None)
    return {
        "selector": selector.name,
        "active_arms": active,
        "pulls": _sum_arms(selector.n_arms, [part["pulls"] for _, part in contexts]),
        "in_flight": _sum_arms(selector.n_arms, [part["in_flight"] for _, part in contexts]),
        "means": means,
        "switches": sum(part["switches"] for _, part in contexts),
        "switching_paid": sum(part["switching_paid"] for _, part in contexts),
        "regret": sum(regrets) if regrets else None,
        "contexts": [{"context": context, **part} for context, part in contexts],
    }


def dump(selector: BaseSelector[Any], tables: Mapping[Hashable, Table]) -> dict[str, Any]:
    version, words, gauss = selector._rng.getstate()
    return {
        "version": VERSION,
        "name": selector.name,
        "options": selector.options(),
        "n_arms": selector.n_arms,
        "active_arms": selector.active_arms,
        "switch_cost": list(selector._switching.costs),
        "rng": [version, list(words), gauss],
        "tables": [[context_to_json(context), table.to_json()] for context, table in tables.items()],
    }


def load(selector: BaseSelector[Any], saved: dict[str, Any]) -> None:
    """Put `saved` into `selector`, all of it or, with a ValueError, none of it."""
    try:
        if saved["version"] != VERSION:
            raise ValueError(f"its version is {saved['version']}, this release reads version {VERSION}.")
        if saved["name"] != selector.name:
            raise ValueError(f"it was saved by {saved['name']!r}, this selector is {selector.name!r}.")
        if saved["options"] != selector.options():
            raise ValueError(f"it was saved with {saved['options']}, this selector has {selector.options()}.")
        n_arms = integer(saved["n_arms"], None)
        active = [integer(arm, n_arms) for arm in saved["active_arms"]]
        costs = [check_number("switch_cost", cost, 0.0) for cost in saved["switch_cost"]]
        if n_arms < 1 or len(costs) != n_arms or sorted(set(active)) != sorted(active):
            raise ValueError("n_arms, active_arms and switch_cost contradict each other.")
        tables: dict[Hashable, Table] = {}
        for context, content in saved["tables"]:
            table = selector._open_table(n_arms)
            table.from_json(content)
            tables[check_context(context_from_json(context))] = table
        version, words, gauss = saved["rng"]
        selector._rng.setstate((version, tuple(words), gauss))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"state_dict refused: {reason}") from error
    selector._tables = tables
    selector._active = active
    selector.n_arms = n_arms
    selector._switching.resize(n_arms)
    selector._switching.set_costs(costs)


def _table_summary(table: Table, active: list[int]) -> dict[str, Any]:
    return {
        "pulls": list(table.pulls),
        "in_flight": list(table.in_flight),
        "means": [table.ledger.mean(arm) for arm in range(len(table.pulls))],
        "switches": table.switches,
        "switching_paid": table.switching_paid,
        "regret": table.regret(active),
    }


def _sum_arms(n_arms: int, rows: list[list[int]]) -> list[int]:
    return [sum(row[arm] for row in rows) for arm in range(n_arms)]
