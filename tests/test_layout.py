"""The shape of the house: links, packages, where tests lie, what a wheel holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "models")


@pytest.mark.parametrize("name", LINKED)
def test_the_package_reaches_a_top_folder_through_a_relative_link(name: str) -> None:
    assert os.readlink(ROOT / "hybrid_engine" / name) == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_a_top_folder_is_no_package_of_its_own(name: str) -> None:
    # A package named `kernels` on the path is taken by transformers for the one on PyPI.
    assert not (ROOT / name / "__init__.py").exists()


@pytest.mark.parametrize("name", LINKED)
def test_every_folder_below_a_top_folder_is_a_package(name: str) -> None:
    folders = {path.parent for path in (ROOT / name).rglob("*.py")} - {ROOT / name}
    assert folders
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_every_operation_has_a_reference_beside_it() -> None:
    operations = [folder for folder in (ROOT / "kernels").iterdir() if (folder / "cpu.py").exists()]
    assert operations
    assert not [folder.name for folder in operations if not (folder / "reference.py").exists()]


def test_tests_lie_where_what_they_test_lies() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    homes = [ROOT, ROOT / "hybrid_engine"]
    tested = {folder for home in homes for folder in folders if (home / folder).is_dir()}
    # A module with many tests has a folder of them.
    tested |= {folder for home in homes for folder in folders if (home / folder).with_suffix(".py").is_file()}
    assert folders == tested


WEIGHTS = "hybrid_engine/tiny_hybrid/model.safetensors"
"""Committed once."""


def test_no_data_file_is_large_but_the_shipped_model() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if files.returncode != 0:
        pytest.skip("not a git checkout: what is committed can't be listed")
    present = [ROOT / name for name in files.stdout.splitlines() if (ROOT / name).is_file()]
    present.remove(ROOT / WEIGHTS)
    assert (ROOT / WEIGHTS).stat().st_size <= 12_000_000
    assert not [path.name for path in present if path.stat().st_size > 2**20]


def wheel_contents(folder: Path) -> set[str]:
    """Build a wheel from a copy (a build leaves files behind that would get into the next) and list what it holds."""
    left_out = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", str(source)]
    subprocess.run(command, check=True, cwd=folder)
    (wheel,) = folder.glob("hybrid_engine-*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_a_wheel_holds_all_that_runs_and_no_tests(tmp_path: Path) -> None:
    held = wheel_contents(tmp_path)
    wanted = {
        str(Path("hybrid_engine") / path.relative_to(ROOT))
        for name in LINKED
        for pattern in ("*.py", "*.cpp", "*.h")
        for path in (ROOT / name).rglob(pattern)
    }
    shipped = ("README.md", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    wanted |= {WEIGHTS, *(str(Path(WEIGHTS).with_name(name)) for name in shipped)}
    assert wanted <= held, f"missing: {sorted(wanted - held)}"
    assert any(name.endswith(".cpp") for name in held)
    assert not [name for name in held if name.startswith(("tests", "kernels", "models"))]
