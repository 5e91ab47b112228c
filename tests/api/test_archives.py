"""What is shipped: both packages in the wheel, all that is needed to test and change them in the source archive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from importlib import metadata
from pathlib import Path

import pytest

import hf_psd

ROOT = Path(__file__).parents[2]
PACKAGES = {"hf_psd": ROOT / "hf_psd", "psd_kernels": ROOT / "kernels" / "torch-ext" / "psd_kernels"}
BUILD = """
import sys
from setuptools import build_meta
place = sys.argv[1]  # building changes sys.argv
build_meta.build_wheel(place)
build_meta.build_sdist(place)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with wheel and source archive, built from a copy."""
    try:
        version = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        pytest.skip("setuptools is not installed")
    if int(version.partition(".")[0]) < 78:
        pytest.skip("this setuptools does not know licence expressions")
    source, built = tmp_path_factory.mktemp("source") / "copy", tmp_path_factory.mktemp("built")
    litter = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "*.safetensors")
    shutil.copytree(ROOT, source, ignore=litter)
    subprocess.run([sys.executable, "-c", BUILD, str(built)], cwd=source, check=True, capture_output=True)
    return built


def modules(folder: Path) -> set[str]:
    return {path.relative_to(folder.parent).as_posix() for path in folder.rglob("*.py")}


def test_wheel(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        meta = message_from_bytes(archive.read(about))
    info = {name for name in names if ".dist-info/" in name}
    for package, folder in PACKAGES.items():
        inside = {name for name in names if name.startswith(f"{package}/")}
        assert inside == modules(folder) | {f"{package}/py.typed"}
        names -= inside
    assert names == info and {Path(name).name for name in info} >= {"LICENSE", "NOTICE", "entry_points.txt"}
    assert meta["Version"] == hf_psd.__version__ and meta["License-Expression"] == "Apache-2.0"


def test_source_archive_can_be_tested_and_changed(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        "NOTICE",
        "pyproject.toml",
        "kernels/build.toml",
    ]
    folders = ("tests", "kernels", "examples", "docs", "requirements", "hf_psd")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    files = [path.relative_to(ROOT) for path in files if path.suffix not in (".pyc", ".safetensors")]
    wanted += [path.as_posix() for path in files if not any(part.startswith(".") for part in path.parts)]
    assert len(wanted) > 200 and not set(wanted) - names
    assert not [name for name in names if "__pycache__" in name]


def test_wheel_works_from_another_folder(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    check = "import hf_psd, psd_kernels; from hf_psd.cli import main; print(hf_psd.__file__, psd_kernels.__file__); main(['--help'])"
    environment = os.environ | {"PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    where, _, usage = done.stdout.partition("\n")
    assert where.split() == [str(place / name / "__init__.py") for name in PACKAGES]
    assert all(command in usage for command in ("bench", "explain", "export-hub"))
