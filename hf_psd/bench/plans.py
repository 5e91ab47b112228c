"""The planner's predictions, where this version has a planner."""

from __future__ import annotations

from dataclasses import asdict, is_dataclass
from typing import Any

from transformers import PreTrainedModel

import hf_psd

from .decoders import arguments_of
from .profiles import Settings
from .prompts import Prompts


def explain_plan(
    target: PreTrainedModel, drafter: PreTrainedModel, prompts: Prompts, settings: Settings
) -> dict[str, Any] | None:
    """`hf_psd.explain` of a call as text and, if it is a dataclass, as fields; None where there is no planner."""
    explain = getattr(hf_psd, "explain", None)
    if explain is None:
        return None
    arguments = arguments_of(settings, prompts, target.device, sampled=False)
    psd = {"mode": "auto", "gamma": settings.gamma, **dict(settings.psd)}
    try:
        explanation = explain(target, [drafter], psd=psd, **arguments)
    except Exception as error:
        return {"text": f"the planner could not say: {type(error).__name__}: {error}"}
    fields = _plain(asdict(explanation)) if is_dataclass(explanation) and not isinstance(explanation, type) else None
    return {"text": str(explanation), "fields": fields}


def _plain(value: Any) -> Any:
    """The value with everything JSON does not know turned into text."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
