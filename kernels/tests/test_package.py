"""The package around the kernels: fallbacks, operators, compilation for every GPU, life beside HF's own `kernels`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import psd_kernels
import pytest
import torch
from psd_kernels import common, naive, ops

KERNELS = Path(__file__).resolve().parents[1]
ROOT = KERNELS.parent


def python(*arguments: str, path: tuple[str | Path, ...] = (), cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=600,
        check=False,
    )


def arguments(rows: int = 2) -> dict:
    return {
        "temperature": torch.ones(rows),
        "seed": 1,
        "position": torch.arange(rows),
        "request": torch.arange(rows),
        "round": torch.zeros(rows, dtype=torch.int64),
    }


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_kernels_compile_without_a_device(capability):
    pytest.importorskip("triton")
    done = python(str(KERNELS / "tests" / "compile_kernels.py"), str(capability))
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) >= 10


def test_import_leaves_triton_alone():
    code = "import sys, psd_kernels; assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    done = python("-c", code, path=(KERNELS / "torch-ext",))
    assert done.returncode == 0, done.stderr


def test_dispatch_falls_back_to_torch(monkeypatch):
    target, drafts = torch.randn(2, 2, 9), torch.zeros(2, 1, dtype=torch.int64)
    expected = naive.verify(target, drafts, **arguments())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not common.uses_kernels(target)
    monkeypatch.setattr(ops, "_verify_op", None)
    assert torch.equal(psd_kernels.verify(target, drafts, **arguments()).ids, expected.ids)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(common.importlib.util, "find_spec", lambda name: None)
    common.has_triton.cache_clear()
    assert torch.equal(psd_kernels.verify(target, drafts, **arguments()).ids, expected.ids)
    common.has_triton.cache_clear()


def test_a_second_copy_finds_the_operators_registered():
    source = KERNELS / "torch-ext" / "psd_kernels" / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "psd_kernels_twin", source, submodule_search_locations=[str(source.parent)]
    )
    twin = importlib.util.module_from_spec(spec)
    sys.modules["psd_kernels_twin"] = twin
    try:
        spec.loader.exec_module(twin)
        assert twin.verify is not psd_kernels.verify
        assert twin.ops._verify_op is ops._verify_op
    finally:
        for name in [name for name in sys.modules if name.startswith("psd_kernels_twin")]:
            del sys.modules[name]


def test_operators_have_matching_fakes():
    pytest.importorskip("triton")
    target, drafts = torch.randn(2, 2, 9), torch.zeros(2, 1, dtype=torch.int64)
    counters = torch.arange(2), torch.arange(2), torch.arange(2)
    caches, where = torch.randn(2, 3, 4, 1, 16), (torch.arange(2), torch.ones(2, 2, dtype=torch.int64))
    checks = ("test_schema", "test_faketensor")
    calls = [
        (ops._verify_op, (target, drafts, None, None, torch.ones(2), None, 1, *counters, "rejection")),
        (ops._sample_op, (target[:, 0], torch.ones(2), torch.tensor(3), 0, *counters, 1)),
        (ops._accept_op, (target[:, 0], target[:, 1], None, None, 2, *counters)),
        (ops._kv_write_op, (*caches, *torch.randn(2, 2, 2, 1, 16), *where)),
        (ops._ragged_attention_op, (torch.randn(2, 2, 2, 16), *caches, *where, None, 3, 2.0, None, 4)),
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for operator, values in calls:
        moved = tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in values)
        torch.library.opcheck(operator, moved, test_utils=checks)


STAND_IN = """
__version__ = "0.18.2"

class Anything:
    def __init__(self, *arguments, **options):
        pass

def __getattr__(name):
    if name.startswith("_"):
        raise AttributeError(name)
    return Anything if name[0].isupper() else lambda *arguments, **options: lambda decorated: decorated
"""


def stand_in_for_hf_kernels(folder: Path) -> Path:
    """A distribution that calls itself `kernels` and has whatever class or decorator is asked of it."""
    from transformers.utils import import_utils

    version = import_utils.KERNELS_MIN_VERSION  # transformers leaves other versions alone
    package, info = folder / "kernels", folder / f"kernels-{version}.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text(STAND_IN)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    return folder


IMPORT = (
    "import sys; sys.path.insert(0, ''); import transformers; from transformers import LlamaForCausalLM; "
    "from transformers.utils import is_kernels_available; import kernels; "
    "print(is_kernels_available(), kernels.__file__)"
)


def test_transformers_imports_from_the_root_beside_hf_kernels(tmp_path):
    """A regular package of this folder's name would hide HF's and break the import, as the second half shows."""
    pytest.importorskip("transformers")
    path = (stand_in_for_hf_kernels(tmp_path / "site"),)
    done = python("-c", IMPORT, path=path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["True", str(path[0] / "kernels" / "__init__.py")]
    shadow = tmp_path / "root" / "kernels"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").touch()
    assert python("-c", IMPORT, path=path, cwd=shadow.parent).returncode != 0


def test_transformers_imports_beside_the_real_hf_kernels():
    try:
        metadata.version("kernels")
    except metadata.PackageNotFoundError:
        pytest.skip("HF's `kernels` is not installed")
    done = python("-c", IMPORT)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not Path(done.stdout.split()[1]).is_relative_to(ROOT / "kernels")
