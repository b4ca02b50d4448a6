"""What is installed: declared dependencies and their floors, and a real wheel with everything that users need of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from ortlaunch.recipe.manual.schema import json_schema

ROOT = Path(__file__).parents[2]
# Modules whose distribution has another name.
DISTRIBUTIONS = {
    "yaml": "pyyaml", "onnxruntime": "onnxruntime-training-cpu", "pydantic_core": "pydantic-core",
    "mlflow": "mlflow-skinny", "huggingface_hub": "huggingface-hub",
}  # fmt: skip
# Imported only where a recipe, a launcher or a verb asks for them; everything else must come with a bare install.
OPTIONAL = {
    "deepspeed", "matplotlib", "mpi4py", "onnx", "onnxruntime-training-cpu", "peft", "tensorboard", "wandb",
    "mlflow-skinny",
}  # fmt: skip


def requirements(*extras: str) -> dict[str, str]:
    """Name -> versions of what a bare install, or some extras, or ("*") everything at once asks for."""
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    asked: dict[str, list[str]] = {}
    for line in (
        line for name in (groups if "*" in extras else extras or [""]) for line in groups[name]
    ):
        versions = re.sub(r"^[\w.-]+", "", line.partition(";")[0]).strip()
        asked.setdefault(_name(line), []).extend([versions] if versions else [])
    return {name: ",".join(versions) for name, versions in asked.items()}


def _name(line: str) -> str:
    return re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")


def pins(file: str) -> dict[str, str]:
    """Name -> version of a constraints file."""
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    return {_name(line): line.partition("==")[2] for line in lines if "==" in line}


def test_floors_are_what_was_run() -> None:
    """constraints/floors.txt, on which the tiny recipes were run, pins each dependency's floor."""
    version = pytest.importorskip("packaging.version").Version
    asked = requirements("*")
    floors = {name: floor[1] for name in asked if (floor := re.search(r">=([\d.]+)", asked[name]))}
    users = floors.keys() - requirements("dev").keys()
    lowest = pins("floors.txt")
    assert {name: version(lowest[name]) for name in users} == {
        name: version(floors[name]) for name in users
    }
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


# Several verbs in one process of the installed Python: the words, and what each prints.
TYPED = """
import contextlib, io, json, sys
from ortlaunch.cli import main
said = {}
for words in sys.argv[1:]:
    sys.argv = ["ortlaunch", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main()
    said[words] = out.getvalue()
print(json.dumps(said))
"""
WORDS = ("recipes copy llama2-7b/tiny mine.yaml", "validate mine.yaml", "schema", "constraints",
         "constraints torch-2.6", "hostfile", "hostfile mpich")  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with our wheel in it, built from a copy; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("ortlaunch", "recipes", "constraints", "hostfiles"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # By pyproject.toml's own backend, as `pip wheel --no-build-isolation` would, but for pip's start.
    _run(
        [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('..')"],
        source,
    )
    _run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    _run([*pip, "install", "--no-deps", "--no-index", "--no-compile", wheel], folder)
    packages = folder / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


@pytest.fixture(scope="module")
def said(installed: Path) -> dict[str, str]:
    """What the verbs of the installed package print."""
    python = installed / "venv" / "bin" / "python"
    return dict(json.loads(_run([python, "-c", TYPED, *WORDS], installed)))


def _run(command: list[str | Path], folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_package_is_typed(installed: Path) -> None:
    """Type checkers read our annotations from a wheel, and it is the wheel that is asked here."""
    python = installed / "venv" / "bin" / "python"
    package = Path(
        _run([python, "-c", "import ortlaunch; print(ortlaunch.__file__)"], installed)
    ).parent
    assert package.is_relative_to(installed)
    assert (package / "py.typed").is_file()


def test_the_wheel_says_what_it_is(installed: Path) -> None:
    """Author, licence and classifiers of pyproject.toml are in the wheel's metadata."""
    metadata = next((installed / "venv").rglob("ortlaunch-*.dist-info/METADATA")).read_text()
    lines = metadata.partition("\n\n")[0].splitlines()
    assert {
        "License-Expression: MIT",
        "Author: The ortlaunch authors",
        "Classifier: Typing :: Typed",
    } <= set(lines)


def test_the_installed_command_and_recipes(installed: Path) -> None:
    """Recipes are listed."""
    names = _run([installed / "venv" / "bin" / "ortlaunch", "recipes", "list"], installed).split()
    assert names == sorted(str(path.relative_to(ROOT / "recipes").with_suffix("")) for path in
                           (ROOT / "recipes").rglob("*.yaml"))  # fmt: skip


def test_a_copy_of_an_installed_recipe(said: dict[str, str], installed: Path) -> None:
    """It is valid, and its schema is the package's."""
    assert said["recipes copy llama2-7b/tiny mine.yaml"] == "mine.yaml\n"
    assert "valid" in said["validate mine.yaml"]
    schema = re.search(r"\$schema=(\S+)", (installed / "mine.yaml").read_text())
    assert schema
    assert Path(schema[1]).read_text() == json_schema() == said["schema"]


def test_the_installed_texts(said: dict[str, str]) -> None:
    """Constraints and example host files are printed as they lie in the repository."""
    for words, file in (
        ("constraints", "constraints/torch-2.13.txt"),
        ("constraints torch-2.6", "constraints/torch-2.6.txt"),
        ("hostfile", "hostfiles/openmpi"),
        ("hostfile mpich", "hostfiles/mpich"),
    ):
        assert said[words] == (ROOT / file).read_text(), words


def test_the_repository_holds_texts_alone() -> None:
    """A `git add -A` beside `pip download` once put 26 MB of wheels into it."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    assert len(files) > 100
    binaries = [file.name for file in files if b"\0" in file.read_bytes()[:8192]]
    assert binaries == ["file-control-character.yaml"]
