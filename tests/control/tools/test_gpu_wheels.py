"""Test tools/gpu_wheels.py: the wheels for a target, and the messages of failures."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gpu_wheels.py"
# Packages that the simulated target lacks: these have to be carried.
NOT_THERE = ("pydantic", "pydantic_core", "annotated-types", "ortlaunch")


@pytest.fixture(scope="module", autouse=True)
def _tools() -> Iterator[None]:
    """Make the script importable as a module."""
    # Not `monkeypatch`: that fixture has function scope.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TOOL.parent))
        yield


def wheels(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the script and return the ended process; `timeout` is in seconds."""
    command = [sys.executable, str(TOOL), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_every_tag_that_a_glibc_runs() -> None:
    """The tags are those of every glibc up to the target's, and the older names by year."""
    # pip matches tags exactly, so a newer glibc does not imply the older tags.
    from gpu_wheels import platforms

    tags = platforms("x86_64", "2.28")
    assert {"manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"} <= set(tags)
    assert "manylinux_2_31_x86_64" not in tags


def test_a_stand_in_is_a_wheel_that_pip_installs(tmp_path: Path) -> None:
    """pip installs the stand-in for torch: an empty wheel of the target's version."""
    # torch itself has gigabytes. No registry has the local part "+there", so pip uses this wheel.
    from gpu_wheels import stand_in

    assert stand_in(tmp_path, "torch", "2.11.0+cu130") == "2.11.0+there"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", f"--find-links={tmp_path}"]
    done = subprocess.run([*pip, f"--target={tmp_path / 'site'}", "torch>=2.6,<2.16"], check=False)
    assert done.returncode == 0
    assert importlib.metadata.Distribution.at(
        tmp_path / "site" / "torch-2.11.0+there.dist-info"
    ).version


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--python=3.12",), "which torch is on the target?"),
        (
            ("--python=3.12", "--have=LIST"),
            "LIST: numpy: must be NAME==VERSION, as pip list --format=freeze prints it",
        ),
        (
            ("--python=3.12", "--torch=2.11.0", "--out=FULL"),
            "FULL: has files in it; give a new folder",
        ),
    ],
)
def test_what_is_missing_is_named(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    """A missing or wrong option ends the script with status 2, before any download."""
    (tmp_path / "LIST").write_text("torch==2.11.0\nnumpy\n")
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "thesis.tex").write_text("")
    # LIST and FULL stand for paths in the temporary folder.
    done = wheels(
        *(
            word.replace("LIST", str(tmp_path / "LIST")).replace("FULL", str(tmp_path / "FULL"))
            for word in words
        )
    )
    assert done.returncode == 2
    assert said in done.stderr.replace(f"{tmp_path}/", "")


@pytest.mark.slow
def test_what_this_python_lacks_is_carried_and_enough(tmp_path: Path) -> None:
    """A target with all packages but pydantic gets four wheels, and ortlaunch runs with them."""
    # ortlaunch itself, and pydantic with two of its dependencies.
    have = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    lines = [f"{name}=={version}" for name, version in have.items() if name not in NOT_THERE]
    (tmp_path / "have.txt").write_text("\n".join(lines))
    out = tmp_path / "wheels"
    site = tmp_path / "site"
    python = f"--python={sys.version_info[0]}.{sys.version_info[1]}"
    done = wheels(python, f"--have={tmp_path / 'have.txt'}", f"--out={out}", timeout=200)
    assert done.returncode == 0, done.stderr
    assert [path.name.partition("-")[0] for path in sorted(out.iterdir())] == [
        "annotated_types", "ortlaunch", "pydantic", "pydantic_core"
    ]  # fmt: skip
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        f"--target={site}",
    ]
    subprocess.run([*pip, *map(str, out.iterdir())], check=True)
    code = "import ortlaunch, pydantic; print(ortlaunch.__file__, pydantic.__file__)"
    # In another folder than the checkout, whose ortlaunch would be imported first.
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert all(path.startswith(str(site)) for path in found.stdout.split())
    # The limit is in MiB; pydantic_core alone has 2.
    small = wheels(
        python,
        f"--have={tmp_path / 'have.txt'}",
        f"--out={tmp_path / 'small'}",
        "--limit=1",
        timeout=200,
    )
    assert small.returncode == 1
    assert "MiB, and 1 are allowed; largest: pydantic_core 2" in small.stderr
