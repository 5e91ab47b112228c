"""What a request gives back: transformers' own result object, with the exception and the time of the first token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

__all__ = ["RequestCancelled", "RequestStatus", "Result"]


class RequestCancelled(RuntimeError):
    """The request was cancelled before it ended by itself."""


@dataclass
class Result(GenerationOutput):
    """One request's state, as transformers' `GenerationOutput`: what it has generated so far, or in the end.

    Attributes:
        request_id, prompt_ids, generated_tokens, error, status: as there; `generated_tokens` ends with the end token.
        logprobs: log-probability of each generated token under the processed scores, if they were asked for.
        created_time, lifespan, timestamps: seconds of `time.perf_counter`: when the request was added, when it was
            seated and when it ended, and (if asked for) when each token reached the host.
        exception: what `error` says, as it was raised; `RequestCancelled` after a cancellation.
        first_token_time: when the first token reached the host, None before.
    """

    exception: BaseException | None = None
    first_token_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from adding the request to its first token, None before."""
        return None if self.first_token_time is None else self.first_token_time - self.created_time


def copy_of(result: Result, **changes: Any) -> Result:
    """A snapshot that later tokens leave as it is."""
    fields = {name: getattr(result, name) for name in result.__dataclass_fields__} | changes
    for name in ("prompt_ids", "generated_tokens", "logprobs"):
        fields[name] = list(fields[name])
    if fields["timestamps"] is not None:
        fields["timestamps"] = list(fields["timestamps"])
    return Result(**fields)
