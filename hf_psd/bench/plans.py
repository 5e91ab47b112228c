"""What `hf_psd.explain` says of a point, beside what was measured."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import PreTrainedModel

from ..explain import explain
from .decoders import arguments_of
from .profiles import Settings
from .prompts import Prompts


def explain_plan(
    target: PreTrainedModel, drafter: PreTrainedModel, prompts: Prompts, settings: Settings
) -> dict[str, Any]:
    """The explanation as `text` and `fields`; where it fails, the text says why."""
    arguments = arguments_of(settings, prompts, target.device, sampled=False)
    psd = {"mode": "auto", "gamma": settings.gamma, **dict(settings.psd)}
    try:
        explanation = explain(target, [drafter], psd=psd, **arguments)
    except Exception as error:  # an account that cannot be given must not cost the measurements
        return {"text": f"no explanation: {type(error).__name__}: {error}", "fields": None}
    return {"text": str(explanation), "fields": asdict(explanation)}
