from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from cases import INTERPRETED

PACKAGE_ROOT = str(Path(__file__).resolve().parents[1] / "torch-ext")
if PACKAGE_ROOT not in sys.path:
    sys.path.insert(0, PACKAGE_ROOT)

if importlib.util.find_spec("triton") is None:
    collect_ignore = ["test_accept.py", "test_attention.py", "test_sample.py", "test_verify.py"]


def import_kernels() -> None:
    """Defines the kernels while the interpreter is asked for; other tests of this session do not ask for it."""
    if importlib.util.find_spec("triton") is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module in ("accept_kernel", "attention_launch", "sample_kernel", "verify_launch"):
            importlib.import_module(f"psd_kernels.{module}")


def spare_the_interpreter() -> None:
    """Within one launch the interpreter patches `triton.language` at every nested function call; once will do."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function):
        if id(function.__globals__) in patched:
            return None
        patched.add(id(function.__globals__))
        return patch(function)

    def launch_afresh(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_afresh


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels_ci: runs in the CI of the Hub's kernels")
    config.addinivalue_line("filterwarnings", "ignore:.*encountered in:RuntimeWarning")
    if INTERPRETED:
        import_kernels()
        spare_the_interpreter()
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ImportError:
        return
    # Shrinking under the interpreter takes minutes; a case is one integer and a few sizes, small as it is.
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    settings.register_profile("kernels", deadline=None, suppress_health_check=list(HealthCheck), phases=phases)
    settings.load_profile("kernels")


@pytest.fixture(autouse=True)
def interpreted_and_poisoned(monkeypatch):
    """CPU tensors go to the interpreted kernels; `torch.empty` yields NaN and the largest integers, so what a kernel
    forgets to write shows."""
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")
