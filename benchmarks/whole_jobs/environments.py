"""An environment of its own for each peer, made on request in a cache folder and kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

_TORCH = "torch==2.13.0"
# The versions of what a user installs; pip chooses the rest, and `installed_versions` lists it.
PINS = {
    "trainer": [
        _TORCH,
        "transformers==5.23.0",
        "datasets==5.2.0",
        "peft==0.21.2",
        "accelerate==1.15.0",
    ],
    "trl": [_TORCH, "trl==1.16.0", "peft==0.21.2"],
    "llama-factory": [_TORCH, "llamafactory==0.9.5"],
}
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_SHOWN = ("torch", "transformers", "datasets", "accelerate", "peft", "trl", "llamafactory")
_LIST_PACKAGES = """
import importlib.metadata, json
found = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
print(json.dumps(dict(sorted(found.items()))))
"""
_PRINT_SOURCE = """
import importlib.util, os
print(os.path.dirname(importlib.util.find_spec("ortlaunch").origin))
"""
_IMPORT_VISION = "import torch\nimport torchvision"


class NoEnvironment(Exception):
    """A peer's environment could not be made; the text has the end of pip's output."""


def make_environment_unless_there(peer: str, cache: Path) -> Path:
    """Return the folder of a peer's commands (bin), after making its environment if necessary.

    Raises:
        NoEnvironment: pip failed.
    """
    folder = cache / "environments" / peer
    mark = folder / "pins.json"
    if mark.exists() and json.loads(mark.read_text()) == PINS[peer]:
        return folder / "bin"
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{peer}: making {folder}: {' '.join(PINS[peer])}", flush=True)
    _run_or_raise([sys.executable, "-m", "venv", str(folder)])
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    index = subprocess.run(
        [sys.executable, str(Path(__file__).parents[2] / "tools" / "torch-index"), _TORCH_INDEX],
        capture_output=True, text=True, check=False,
    ).stdout.split()  # fmt: skip
    _run_or_raise([*pip, "install", *index, *PINS[peer]])
    if peer == "llama-factory":
        _remove_builds_for_other_torch(python, pip)
    mark.write_text(json.dumps(PINS[peer]))
    return folder / "bin"


def _remove_builds_for_other_torch(python: str, pip: list[str]) -> None:
    """Remove torchvision and torchaudio where they are builds for another torch.

    Where PyTorch's index cannot be reached, pip takes PyPI's CUDA builds beside a CPU build of
    torch; the first cannot be imported, and LLaMA-Factory then does not start. It does not use them
    on text. A package that only has a name stands for torchaudio, which it imports.
    """
    if subprocess.run([python, "-c", _IMPORT_VISION], capture_output=True, check=False).returncode:
        print("llama-factory: without torchvision and torchaudio, which do not fit this torch")
        _run_or_raise([*pip, "uninstall", "--yes", "torchvision", "torchaudio"])
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"], text=True
        )
        (Path(site.strip()) / "torchaudio.py").write_text('"""Stands for a build that fits."""\n')


def installed_versions(python: Path) -> dict[str, str]:
    """Return the version of every package of an environment, and the commit of ortlaunch's."""
    versions: dict[str, str] = json.loads(
        # Isolated: the current folder, such as this repository, is not of the environment.
        subprocess.check_output([str(python), "-I", "-c", _LIST_PACKAGES], text=True)
    )
    if "ortlaunch" in versions:
        source = subprocess.check_output([str(python), "-I", "-c", _PRINT_SOURCE], text=True)
        head = ["git", "-C", source.strip(), "describe", "--always", "--dirty", "--abbrev=10"]
        commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout
        versions["ortlaunch"] += f" ({commit.strip() or 'no commit'})"
    return versions


def shown_versions(versions: dict[str, str]) -> str:
    """Return a line with the versions of the packages that matter."""
    names = ("ortlaunch", *_SHOWN, "onnxruntime-training-cpu", "onnxruntime-training")
    return ", ".join(f"{name} {versions[name]}" for name in names if name in versions)


def _run_or_raise(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NoEnvironment(f"{' '.join(command)}:\n{(ended.stdout + ended.stderr)[-2000:]}")
