"""What is installed: declared dependencies and their floors, and a real wheel with everything that users need of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ortlaunch.recipe.schema import json_schema
from tests.control.test_imports import imported, in_standard_library, parsed

ROOT = Path(__file__).parents[2]
# Modules whose distribution has another name.
DISTRIBUTIONS = {"yaml": "pyyaml", "onnxruntime": "onnxruntime-training-cpu", "pydantic_core": "pydantic-core"}
# Imported only where a recipe, a launcher or a verb asks for them; everything else must come with a bare install.
OPTIONAL = {"deepspeed", "matplotlib", "mpi4py", "onnx", "onnxruntime-training-cpu", "peft", "tensorboard"}


def requirements(*extras: str) -> dict[str, str]:
    """Name -> versions of what a bare install, or some extras, or ("*") everything at once asks for."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    asked: dict[str, list[str]] = {}
    for line in (line for name in (groups if "*" in extras else extras or [""]) for line in groups[name]):
        versions = re.sub(r"^[\w.-]+", "", line.partition(";")[0]).strip()
        asked.setdefault(_name(line), []).extend([versions] if versions else [])
    return {name: ",".join(versions) for name, versions in asked.items()}


def _name(line: str) -> str:
    return re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")


def pins(file: str) -> dict[str, str]:
    """Name -> version of a constraints file."""
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    return {_name(line): line.partition("==")[2] for line in lines if "==" in line}


def _imports() -> set[str]:
    trees = [parsed(path.read_text(encoding="utf-8")) for path in (ROOT / "ortlaunch").rglob("*.py")]
    names = {name.partition(".")[0] for tree in trees for name in imported(tree, ())} - {"ortlaunch"}
    return {DISTRIBUTIONS.get(name, name) for name in names if not in_standard_library(name)}


def test_every_imported_package_is_declared() -> None:
    """What any module imports is a dependency; what only some runs need, an extra."""
    assert {"torch", "typer", "onnx", "safetensors"} <= _imports()
    assert _imports() - OPTIONAL - set(requirements()) == set()
    assert OPTIONAL - set(requirements("*")) == set()


def test_floors_are_what_was_run() -> None:
    """constraints/floors.txt, on which the tiny recipes were run, pins each dependency's floor."""
    version = pytest.importorskip("packaging.version").Version
    asked = requirements("*")
    floors = {name: floor[1] for name in asked if (floor := re.search(r">=([\d.]+)", asked[name]))}
    users = floors.keys() - requirements("dev").keys()
    lowest = pins("floors.txt")
    assert {name: version(lowest[name]) for name in users} == {name: version(floors[name]) for name in users}
    assert len(users) > 10


@pytest.mark.parametrize("file", ["floors.txt", "torch-2.6.txt", "torch-2.13.txt"])
def test_constraints_are_within_the_bounds(file: str) -> None:
    """No tested set contradicts pyproject.toml."""
    specifiers = pytest.importorskip("packaging.specifiers")
    asked = requirements("*")
    outside = {
        name: (version, asked[name])
        for name, version in pins(file).items()
        if name in asked and not specifiers.SpecifierSet(asked[name]).contains(version)
    }
    assert outside == {}


# ------------------------------------------------------------------------------------------------------- the wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with our wheel in it, built from a copy; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ortlaunch", "recipes", "constraints", "hostfiles"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    _run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source], folder)
    _run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    _run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    packages = Path(_run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip())
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


def _run(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ortlaunch(installed: Path, *words: str) -> str:
    """What the installed command prints."""
    return _run([installed / "venv" / "bin" / "ortlaunch", *words], installed)


def test_the_installed_package_is_typed(installed: Path) -> None:
    """Type checkers read our annotations from a wheel, and it is the wheel that is asked here."""
    code = "import ortlaunch, pathlib; print(pathlib.Path(ortlaunch.__file__).with_name('py.typed').is_file())"
    python = installed / "venv" / "bin" / "python"
    assert _run([python, "-c", f"{code}; print(ortlaunch.__file__)"], installed).splitlines()[0] == "True"
    assert str(installed) in _run([python, "-c", "import ortlaunch; print(ortlaunch.__file__)"], installed)


def test_the_wheel_says_what_it_is(installed: Path) -> None:
    """Author, licence and classifiers of pyproject.toml are in the wheel's metadata."""
    metadata = next((installed / "venv").rglob("ortlaunch-*.dist-info/METADATA")).read_text()
    lines = metadata.partition("\n\n")[0].splitlines()
    assert {"License-Expression: MIT", "Author: The ortlaunch authors", "Classifier: Typing :: Typed"} <= set(lines)


def test_the_installed_recipes_and_schema(installed: Path) -> None:
    """Recipes are listed and valid, and their schema is the package's."""
    names = ortlaunch(installed, "recipes", "list").split()
    assert names == sorted(str(path.relative_to(ROOT / "recipes").with_suffix("")) for path in
                           (ROOT / "recipes").rglob("*.yaml"))  # fmt: skip
    (new,) = ortlaunch(installed, "recipes", "copy", "llama2-7b/tiny", "mine.yaml").split()
    assert "valid" in ortlaunch(installed, "validate", new)
    schema = re.search(r"\$schema=(\S+)", (installed / new).read_text())
    assert schema
    assert Path(schema[1]).read_text() == json_schema() == ortlaunch(installed, "schema")


@pytest.mark.parametrize(
    ("verb", "folder", "default", "name"),
    [("constraints", "constraints", "torch-2.13.txt", "torch-2.6"), ("hostfile", "hostfiles", "openmpi", "mpich")],
)
def test_the_installed_texts(verb: str, folder: str, default: str, name: str, installed: Path) -> None:
    """Constraints and example host files are printed as they lie in the repository."""
    assert ortlaunch(installed, verb) == (ROOT / folder / default).read_text()
    (file,) = (ROOT / folder).glob(f"{name}*")
    assert ortlaunch(installed, verb, name) == file.read_text()
