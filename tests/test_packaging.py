"""What an installation holds: the wheel is whole, works alone, and follows from the sdist too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Where a folder of the checkout stands in the wheel.
IN_WHEEL = {
    "codegen/kvloom_codegen": "kvloom_codegen",
    "generated/kvloom_generated": "kvloom_generated",
    "runtime/kvloom": "kvloom",
    "specs": "kvloom_codegen/specs",
}
IN_SDIST = (*IN_WHEEL, "tests", "docs", "examples", "benchmarks", ".ci")
SDIST_FILES = ("pyproject.toml", "constraints.txt", "Makefile", "README.md", "LICENSE")


@dataclass(frozen=True)
class Built:
    """The two distributions of the checkout, and the wheel unpacked where pip put it."""

    wheel: Path
    sdist: Path
    installed: Path


def run(*command: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def build(source: Path, kind: str, target: Path) -> Path:
    run("-m", "hatchling", "build", "-t", kind, "-d", str(target), cwd=source)
    (built,) = target.iterdir()
    return built


def tree(folder: Path) -> set[str]:
    """All files below ``folder``, as paths relative to it, without what Python leaves behind."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    wheel = build(ROOT, "wheel", folder / "wheel")
    sdist = build(ROOT, "sdist", folder / "sdist")
    installed = folder / "installed"
    options = ("--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run("-m", "pip", "install", *options, "--target", str(installed), str(wheel), cwd=folder)
    return Built(wheel, sdist, installed)


def test_the_wheel_holds_the_three_packages_and_the_specs_whole_and_nothing_else(
    built: Built,
) -> None:
    expected = {
        f"{place}/{file}" for folder, place in IN_WHEEL.items() for file in tree(ROOT / folder)
    }
    names = zipfile.ZipFile(built.wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.parametrize("package", ["kvloom", "kvloom_codegen", "kvloom_generated"])
def test_every_package_is_marked_as_typed(built: Built, package: str) -> None:
    assert (built.installed / package / "py.typed").is_file()


def test_the_wheel_carries_the_templates(built: Built) -> None:
    assert tree(built.installed / "kvloom_codegen" / "templates")


def test_the_metadata_says_version_license_dependencies_and_extras(built: Built) -> None:
    (metadata_file,) = built.installed.glob("kvloom-*.dist-info/METADATA")
    metadata = Parser().parsestr(metadata_file.read_text(encoding="utf-8"))
    version: dict[str, str] = {}
    exec((ROOT / "runtime/kvloom/_version.py").read_text(encoding="utf-8"), version)
    requirements = metadata.get_all("Requires-Dist", [])
    plain = {entry for entry in requirements if "extra ==" not in entry}
    assert metadata["Version"] == version["__version__"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {entry.partition(">=")[0] for entry in plain} == {"numba", "numpy", "torch"}
    extras = {"codegen", "cuda12", "cuda13", "dev", "lmcache"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    (entry_points,) = built.installed.glob("kvloom-*.dist-info/entry_points.txt")
    assert "[lmcache.device_plugins]" in entry_points.read_text(encoding="utf-8")
    assert list(metadata_file.parent.glob("licenses/LICENSE"))


INSTALLED = """
import json
import kvloom, kvloom_codegen, kvloom_generated
from kvloom_codegen.sources import specs_dir

print(json.dumps({
    "files": [p.__file__ for p in (kvloom, kvloom_codegen, kvloom_generated)],
    "version": kvloom.__version__,
    "specs": str(specs_dir()),
    "layouts": [layout.name for layout in kvloom.layouts()],
}))
"""


def test_an_installed_wheel_finds_its_own_specs_and_lists_its_layouts(
    built: Built, tmp_path: Path
) -> None:
    # PYTHONPATH stands before what an editable installation adds.
    said = json.loads(run("-c", INSTALLED, cwd=tmp_path, PYTHONPATH=str(built.installed)))
    layouts = {path.stem for path in (ROOT / "specs/layouts").glob("*.yaml")}
    assert [file for file in said["files"] if not Path(file).is_relative_to(built.installed)] == []
    assert Path(said["specs"]) == built.installed / "kvloom_codegen/specs"
    assert tree(Path(said["specs"])) == tree(ROOT / "specs")
    assert f"kvloom-{said['version']}-" in built.wheel.name
    assert len(said["layouts"]) == len(set(said["layouts"]))
    assert set(said["layouts"]) == layouts


def test_the_sdist_holds_what_builds_and_tests_need(built: Built) -> None:
    top = built.sdist.name.removesuffix(".tar.gz")
    with tarfile.open(built.sdist) as archive:
        names = {name.removeprefix(f"{top}/") for name in archive.getnames()}
    needed = {f"{folder}/{file}" for folder in IN_SDIST for file in tree(ROOT / folder)}
    assert (needed | set(SDIST_FILES)) - names == set()


def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        # Python 3.12 and 3.13 warn without a filter; early 3.10 and 3.11 have none.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(tmp_path)
    (source,) = tmp_path.iterdir()
    again = build(source, "wheel", tmp_path / "wheel")
    assert again.name == built.wheel.name
    assert _contents(again) == _contents(built.wheel)


def _contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
