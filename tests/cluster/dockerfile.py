"""Run the steps of a Dockerfile in folders, where no container engine is needed.

Each stage is a folder with a root file system: Debian's by debootstrap, or a copy of another stage's.
It knows what docker/Dockerfile has: ARG, FROM, ENV, WORKDIR, COPY, RUN, USER and ENTRYPOINT. It takes
root and namespaces of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# How this machine reaches its indexes: names of files, and variables.
_NETWORK_FILES = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/root/.config/pip/pip.conf", "/etc/xdg/pip/pip.conf",
    "/etc/xdg/pip/constraints.txt",
)  # fmt: skip
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_STEP_SECONDS = 1500


@dataclass
class Stage:
    """A stage with the settings that its steps have made."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"
    entry_point: Sequence[str] = ()


def build(
    file: Path, context: Path, target: str, folder: Path, arguments: Mapping[str, str]
) -> Stage:
    """Run the steps of a target and of the stages that it needs; return the target's stage.

    Args:
        context: the folder that COPY reads, by its .dockerignore.
        folder: an empty folder for the root file systems of the stages.
        arguments: values of ARG by name, as of `docker build --build-arg`.
    """
    steps = _steps(file.read_text())
    starts = [number for number, (word, _) in enumerate(steps) if word == "FROM"]
    stages = {
        steps[start][1].split(" AS ")[1]: (steps[start][1].split(" AS ")[0], steps[start + 1 : end])
        for start, end in zip(starts, [*starts[1:], len(steps)])
    }
    built: dict[str, Stage] = {}

    def stage_by_name(name: str) -> Stage:
        if name not in built:
            base, own_steps = stages[name]
            root = folder / name
            if base in stages:
                source = stage_by_name(base)
                _run(["cp", "--archive", "--reflink=auto", str(source.root), str(root)])
                built[name] = Stage(root, dict(source.environ), {}, source.folder, source.user)
            else:
                _run(
                    [
                        "debootstrap",
                        "--variant=minbase",
                        base.partition(":")[2].partition("-")[0],
                        str(root),
                    ]
                )
                _copy_network_settings(root)
                built[name] = Stage(root)
            for step in own_steps:
                take_step(built[name], *step)
        return built[name]

    def take_step(stage: Stage, word: str, rest: str) -> None:
        if word == "ARG":
            name, _, value = rest.partition("=")
            stage.arguments[name] = arguments.get(name, value.strip('"'))
        elif word == "ENV":
            for pair in shlex.split(rest):
                name, _, value = pair.partition("=")
                stage.environ[name] = _with_values(value, {**stage.environ, **stage.arguments})
        elif word == "WORKDIR":
            stage.folder = rest
            (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            stage.user = rest
        elif word == "ENTRYPOINT":
            stage.entry_point = json.loads(rest)
        elif word == "COPY":
            *sources, destination = [each for each in rest.split() if not each.startswith("--")]
            other = re.match(r"--from=(\S+)", rest)
            source_root = stage_by_name(other[1]).root if other else context
            for source in sources:
                _copy(
                    source_root / source.lstrip("/"),
                    stage.root / destination.lstrip("/"),
                    stage,
                    not other,
                )
        else:
            assert word == "RUN", word
            run_in(stage, ["sh", "-ec", rest], {**stage.arguments, **_network_variables(stage)})

    return stage_by_name(target)


def run_in(
    stage: Stage,
    command: Sequence[str],
    environ: Mapping[str, str],
    mounts: Sequence[str] = (),
    user: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a stage's root and return it; it must succeed.

    Args:
        mounts: commands of the shell, in the namespace of mounts in which the command runs; $ROOT is
            the root file system.
    """
    variables = {**stage.environ, "DEBIAN_FRONTEND": "noninteractive", **environ}
    variables.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    inside = shlex.join(["env", "-i", *(f"{name}={value}" for name, value in variables.items()),
                         "sh", "-c", 'cd "$0" && exec "$@"', stage.folder, *command])  # fmt: skip
    script = "\n".join([
        "set -e", "mount --bind $ROOT $ROOT", "mount -t proc proc $ROOT/proc", "mount --rbind /dev $ROOT/dev",
        "mount --rbind /sys $ROOT/sys",
        *(f"mkdir -p $ROOT{folder} && mount --bind {folder} $ROOT{folder}" for folder in _local_indexes()
          if not mounts),
        *mounts, f"exec chroot --userspec={user or '0:0'} $ROOT {inside}",
    ])  # fmt: skip
    return _run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", script],
        {**os.environ, "ROOT": str(stage.root)},
    )


def _with_values(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], ""), text)


def _steps(text: str) -> list[tuple[str, str]]:
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [
        (word, rest.strip()) for line in lines if line for word, _, rest in [line.partition(" ")]
    ]


def _copy(source: Path, destination: Path, stage: Stage, is_context: bool) -> None:
    destination = (
        stage.root / stage.folder.lstrip("/") if destination == stage.root / "." else destination
    )
    if not is_context:
        _run(["cp", "--archive", str(source), str(destination)])
        return
    destination.mkdir(parents=True, exist_ok=True)
    lines = (source / ".dockerignore").read_text().splitlines()
    for name in [line[1:] for line in lines if line.startswith("!")]:
        left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        if (source / name).is_dir():
            shutil.copytree(source / name, destination / name, symlinks=True, ignore=left_out)
        else:
            shutil.copy(source / name, destination)


def _copy_network_settings(root: Path) -> None:
    for name in (*_NETWORK_FILES, str(_CERTIFICATES)):
        if Path(name).exists():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(name, root / name[1:])
    # The package ca-certificates writes its own file there.
    shutil.copy(_CERTIFICATES, root / "tmp" / "certificates.crt")


def _network_variables(stage: Stage) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    certificates = dict.fromkeys(
        ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), "/tmp/certificates.crt"
    )
    return {**kept, **certificates} if (stage.root / "tmp/certificates.crt").exists() else kept


def _local_indexes() -> list[str]:
    """Return folders of this machine that pip's settings name."""
    texts = [*map(str, os.environ.values())]
    texts += [
        Path(name).read_text() for name in _NETWORK_FILES if "pip" in name and Path(name).exists()
    ]
    names = re.findall(r"(?:file://|(?<=[\s=]))(/[\w./-]+)", "\n".join(texts))
    names += [value for name, value in os.environ.items() if name == "PIP_FIND_LINKS"]
    roots = {
        "/" + "/".join(name.split("/")[1:3])
        for name in names
        if name.startswith("/opt/") and Path(name).exists()
    }
    return sorted(roots)


def _run(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=_STEP_SECONDS, check=False
    )
    assert done.returncode == 0, (
        f"{command[-1][-500:]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done
