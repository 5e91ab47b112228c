"""Logits processors that speculative decoding cannot serve, each with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Collection

from transformers.generation.logits_process import LogitsProcessor

_GUIDANCE = (
    "it runs the model a second time and keeps a key-value cache that grows by one token per call, which rejected "
    "drafts would corrupt",
    "Leave `guidance_scale` unset, or call `generate` without `psd`.",
)
_BATCHED_GUIDANCE = (
    "it expects twice as many score rows as sequences",
    "Call `generate` without `psd`.",
)
_AUDIO = (
    "it serves models that write audio codebooks, not a text decoder's vocabulary",
    "Call `generate` without `psd`.",
)
_WHISPER = (
    "it serves Whisper, an encoder-decoder model",
    "Call `generate` without `psd`.",
)

REFUSED: dict[str, tuple[str, str]] = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": _GUIDANCE,
    "ClassifierFreeGuidanceLogitsProcessor": _BATCHED_GUIDANCE,
    "SynthIDTextWatermarkLogitsProcessor": (
        "it keeps a context and a call counter that advance with every call, which rejected drafts would corrupt",
        "Use `WatermarkingConfig` instead of `SynthIDTextWatermarkingConfig`, or call `generate` without `psd`.",
    ),
    "AlternatingCodebooksLogitsProcessor": _AUDIO,
    "WhisperTimeStampLogitsProcessor": _WHISPER,
    "WhisperNoSpeechDetection": _WHISPER,
    "DiaClassifierFreeGuidanceLogitsProcessor": _BATCHED_GUIDANCE,
    "DiaEOSChannelFilterLogitsProcessor": _AUDIO,
    "DiaEOSDelayPatternLogitsProcessor": _AUDIO,
}

_GRAMMAR_ENGINES = ("xgrammar", "outlines", "llguidance")
_GRAMMAR_ENGINE = (
    "it keeps one grammar state per batch row that advances with every call",
    "Pass the grammar as `prefix_allowed_tokens_fn`, which is given the whole prefix.",
)
_UNLISTED = (
    "it is not known to depend on its arguments alone",
    "If it does, pass an instance of your own subclass of it; otherwise call `generate` without `psd`.",
)


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def refusal(processor: LogitsProcessor, served: Collection[str]) -> str | None:
    """Why `processor` is refused, as a full message, or None if it is not.

    Subclasses inherit a refusal: they share the state that causes it. A transformers class outside `served` is refused
    because it may keep state; a class of the user's own is taken to depend on its arguments alone.
    """
    reason = _reason(type(processor), served)
    if reason is None:
        return None
    why, remedy = reason
    return f"{type(processor).__name__} cannot be used with speculative decoding: {why}. {remedy}"


def _reason(cls: type, served: Collection[str]) -> tuple[str, str] | None:
    for base in cls.__mro__:
        if _package(base) == "transformers" and base.__name__ in REFUSED:
            return REFUSED[base.__name__]
        if _package(base) in _GRAMMAR_ENGINES:
            return _GRAMMAR_ENGINE
    if _package(cls) == "transformers" and cls.__name__ not in served:
        return _UNLISTED
    return None
