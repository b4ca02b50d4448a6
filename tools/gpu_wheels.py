"""Collect the wheels for ortlaunch and tests/gpu on a machine without access to a package registry.

    python tools/gpu_wheels.py --out wheels
        for the python3 on this machine's PATH
    python tools/gpu_wheels.py --out wheels --python 3.12 --torch 2.11.0 --have installed.txt
        for a Python elsewhere

torch is the target's own and never included. `installed.txt` is the output of `python3 -m pip list
--format=freeze` there: none of these packages is included, and all others fit them. Then, on the
target:

    python3 -m pip install --no-index --no-deps wheels/*.whl

Exit status 1 if the wheels are larger than the limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTED = ROOT / "constraints" / "torch-2.13.txt"
TOOLS = ("pytest>=8", "pytest-timeout")  # for the tests marked gpu
THERE = "+there"  # the local version of a stand-in for what the target has
# No wheel in the registry. Without its compiled operators it is pure Python.
SOURCES_ONLY = ("deepspeed",)
# Parts of this tree that a wheel of ortlaunch does not need.
NOT_COPIED = (".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "bench", "tests", "docs")
# Runs in the target's Python, which may lack every package.
_ASKS = """
import importlib.metadata as m, json, platform, sys
print(json.dumps({"python": "%d.%d" % sys.version_info[:2], "machine": platform.machine(),
    "glibc": platform.libc_ver()[1], "packages": {d.metadata["Name"]: d.version for d in m.distributions()}}))
"""


def main() -> int:
    """Create the folder of wheels; return the exit status."""
    options = _options()
    target = _target(options)
    # `pip install wheels/*.whl` would install old wheels, too.
    if options.out.exists() and any(options.out.iterdir()):
        return _refuse(f"{options.out}: has files in it; give a new folder")
    with tempfile.TemporaryDirectory(prefix="gpu-wheels-") as scratch:
        problem = _collect(target, options, Path(scratch))
    return _refuse(problem) if problem else _conclusion(options, target)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("wheels"), help="a new folder")
    parser.add_argument(
        "--target",
        default="python3",
        help="a Python to ask for all that is not given; default: python3",
    )
    parser.add_argument("--python", help="the target's, as 3.12")
    parser.add_argument("--torch", help="the target's, as 2.11.0")
    parser.add_argument("--glibc", help="the target's, as 2.39; 2.28 where --python is given")
    parser.add_argument(
        "--have", type=Path, help="what the target has, NAME==VERSION a line; else torch alone"
    )
    parser.add_argument(
        "--extras", default="deepspeed,lora", help="of ortlaunch; default: deepspeed,lora"
    )
    parser.add_argument(
        "--without", nargs="*", default=[], help="packages to leave out, with what only they need"
    )
    parser.add_argument("--limit", type=float, default=64, help="MiB, all together; default: 64")
    return parser.parse_args()


def _refuse(problem: str, status: int = 2) -> int:
    print(f"gpu_wheels: {problem}", file=sys.stderr)
    return status


# ------------------------------------------------------------ the target


def _target(options: argparse.Namespace) -> dict[str, Any]:
    """Return Python, glibc, machine and packages of the target, from options or its Python."""
    # Without --python the target is a Python of this machine and can report on itself.
    if options.python is None:
        asked: dict[str, Any] = json.loads(
            subprocess.run(
                [options.target, "-c", _ASKS], stdout=subprocess.PIPE, text=True, check=True
            ).stdout
        )
    else:
        asked = {
            "python": options.python,
            "machine": platform.machine(),
            "glibc": "2.28",  # of manylinux_2_28: most systems have it or a newer one
            "packages": {},
        }
    # Options win over the report.
    if options.have:
        asked["packages"] = dict(_pins(options.have.read_text().splitlines(), options.have))
    if options.torch:
        asked["packages"]["torch"] = options.torch
    asked["glibc"] = options.glibc or asked["glibc"]
    # Always rebuilt from this tree.
    asked["packages"].pop("ortlaunch", None)
    if "torch" not in asked["packages"]:
        raise SystemExit(
            _refuse(
                f"which torch is on the target? {options.target} has none; give --torch VERSION"
            )
        )
    return asked


def _pins(lines: Iterable[str], file: Path) -> Iterable[tuple[str, str]]:
    for line in filter(None, map(str.strip, lines)):
        name, pinned, version = line.partition("==")
        if pinned:
            yield name, version
        elif " @ " not in line and not line.startswith(("-", "#")):
            raise SystemExit(
                _refuse(
                    f"{file}: {line}: must be NAME==VERSION, as pip list --format=freeze prints it"
                )
            )


def platforms(machine: str, glibc: str) -> list[str]:
    """Return every platform tag of a wheel that runs on this glibc; pip matches tags exactly."""
    newest = int(glibc.partition(".")[2])
    return [*(f"manylinux_2_{minor}_{machine}" for minor in range(newest, 4, -1)),
            *(f"manylinux{year}_{machine}" for year in ("2014", "2010", "1"))]  # fmt: skip


# ------------------------------------------------------------ the wheels


def _collect(target: dict[str, Any], options: argparse.Namespace, scratch: Path) -> str:
    """Fill the folder; return the reason of a failure, else ""."""
    stand_ins = scratch / "there"
    built = scratch / "built"
    stand_ins.mkdir()
    there = {**target["packages"], **dict.fromkeys(options.without, "9999")}
    pins = [f"{name}=={stand_in(stand_ins, name, version)}" for name, version in there.items()]
    extras = [extra for extra in options.extras.split(",") if extra]
    requirements = [f"ortlaunch[{','.join(extras)}]" if extras else "ortlaunch", *TOOLS]
    constraints = scratch / "constraints.txt"
    constraints.write_text("\n".join([*pins, *_tested_beside(there)]))
    problem = _build(built, extras, there, scratch)
    if problem:
        return problem
    where = [f"--platform={tag}" for tag in platforms(target["machine"], target["glibc"])]
    problem = _pip(
        "download", "--dest", str(options.out), "--only-binary=:all:", "--implementation=cp", *where,
        f"--python-version={target['python']}", f"--find-links={stand_ins}", f"--find-links={built}",
        f"--constraint={constraints}", *requirements,
    )  # fmt: skip
    for path in options.out.glob(f"*{THERE}-py3-none-any.whl"):
        path.unlink()
    return problem


def stand_in(folder: Path, name: str, version: str) -> str:
    """Write an empty wheel for a package of the target; return its version.

    No registry has that version, so pip takes the wheel.
    """
    module = re.sub(r"[-_.]+", "_", name)
    version = version.partition("+")[0] + THERE
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return version


def _tested_beside(there: Iterable[str]) -> list[str]:
    """Return tested versions of all packages that the target lacks."""
    named = {_canonical(name) for name in there}
    tested = [
        line
        for line in TESTED.read_text().splitlines()
        if "==" in line and not line.startswith("#")
    ]
    return [line for line in tested if _canonical(line.partition("==")[0]) not in named]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _build(built: Path, extras: list[str], there: Iterable[str], scratch: Path) -> str:
    """Build missing wheels: ortlaunch and ortmodule from a copy of this tree, DeepSpeed without operators."""
    copy = scratch / "ortlaunch"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
    problem = _pip(
        "wheel", "--no-deps", "--wheel-dir", str(built), str(copy), str(copy / "ortmodule")
    )
    named = {_canonical(name) for name in there}
    for name in (
        name for name in SOURCES_ONLY if name in extras and name not in named and not problem
    ):
        pin = next(line for line in TESTED.read_text().splitlines() if line.startswith(f"{name}=="))
        problem = _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), pin)
    return problem


def _pip(*words: str) -> str:
    """Run pip; return the errors that it printed, else ""."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        words[0],
        "--quiet",
        *words[1:],
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "error:" in line]
    return "" if done.returncode == 0 else " / ".join(errors) or done.stderr[-500:]


# ------------------------------------------------------------ conclusion


def _conclusion(options: argparse.Namespace, target: dict[str, Any]) -> int:
    sizes = {path.name: path.stat().st_size / 2**20 for path in options.out.glob("*.whl")}
    total = sum(sizes.values())
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    for name in sorted(sizes):
        print(f"{sizes[name]:7.2f} MiB  {name}")
    print(
        f"{total:7.2f} MiB  for Python {target['python']} with torch {target['packages']['torch']}"
    )
    if total > options.limit:
        told = ", ".join(f"{name.partition('-')[0]} {sizes[name]:.0f}" for name in largest)
        return _refuse(
            f"{total:.0f} MiB, and {options.limit:g} are allowed; largest: {told}. Give "
            "--have, and the target's own "
            "are not carried; or --without datasets pyarrow pandas, which the proof does not need",
            status=1,
        )
    print(f"there: python3 -m pip install --no-index --no-deps {options.out.name}/*.whl")
    return 0


if __name__ == "__main__":
    sys.exit(main())
