"""What every test runs under: one thread, no network, and memory that is not zero by luck."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
settings.register_profile(
    "hf_psd", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))
)
settings.load_profile("hf_psd")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` yields NaN and the largest integers, so a read of what nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-parity", action="store_true", help="write docs/parity.md from tests/parity/features.py")
    parser.addoption("--write-families", action="store_true", help="write docs/families.md (slow)")
