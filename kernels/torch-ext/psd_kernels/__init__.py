"""Sampling, verification and ragged attention for speculative decoding: Triton kernels and their specification."""

from __future__ import annotations

from . import naive, naive_attention, philox
from .common import uses_kernels
from .naive import Accepted, Sample, Verdict, accepted, bad_rows
from .ops import accept, kv_write, ragged_attention, sample, verify
from .philox import ACCEPT, COUPLED, DRAFT, RESIDUAL

__all__ = [
    "ACCEPT",
    "COUPLED",
    "DRAFT",
    "RESIDUAL",
    "Accepted",
    "Sample",
    "Verdict",
    "accept",
    "accepted",
    "bad_rows",
    "kv_write",
    "naive",
    "naive_attention",
    "philox",
    "ragged_attention",
    "sample",
    "uses_kernels",
    "verify",
]
