"""Test which versions of torch and transformers engine ort runs on; write docs/evidence/versions.md.

`make matrix`, or `python tools/matrix.py --torch 2.8.0` for one row. Every pair is installed and
trained against eager. There is one environment for each torch in the cache folder, deleted when its
row is done (torch with CUDA's libraries is 3-6 GB); transformers is exchanged in it. Results are
kept in results.json there, and a later call continues after them. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "evidence" / "versions.md"
TORCH = ("2.4.1", "2.6.0", "2.8.0", "2.10.0", "2.13.0", "2.15.0")
TRANSFORMERS = ("4.52.4", "5.23.0")
CHECKS = {
    "bert": "BERT",
    "llama": "Llama",
    "lora": "LoRA",
    "custom": "custom autograd function",
    "attention": "nn.TransformerEncoderLayer",
}
# Largest relative differences from eager that count as equal, in float32.
LIMITS = {"loss": 1e-5, "gradient": 1e-4}
ENOUGH_DISK = 9e9  # bytes; a torch with CUDA's libraries takes 6-9 GB while it is installed
# Pinned by the constraints of the default set, for every torch and transformers.
PINNED = (
    "onnx",
    "onnxruntime-training-cpu",
    "deepspeed",
    "Cerberus",
    "h5py",
    "ninja",
    "setuptools",
    "wheel",
    "numpy",
)
# ortlaunch's other dependencies, in any version that pip selects.
OTHERS = ("peft", "pydantic", "pyyaml", "typer", "datasets")


def main() -> int:
    """Run every cell that has no result yet, and write the table."""
    options = _options()
    options.cache.mkdir(parents=True, exist_ok=True)
    results = _read(options.cache)
    for torch in options.torch:
        wanted = [
            t
            for t in options.transformers
            if options.again or t not in results.get(torch, {}).get("cells", {})
        ]
        if wanted:
            _row(torch, wanted, results, options)
        for transformers in options.transformers:
            print(
                (
                    f"torch {torch}, transformers {transformers}: "
                    f"{_told(results[torch], transformers)}"
                ),
                flush=True,
            )
    if options.write:
        TABLE.parent.mkdir(exist_ok=True)
        TABLE.write_text(_table(results))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ortlaunch-matrix"
    parser.add_argument("--torch", nargs="+", default=TORCH, help="rows; default: all")
    parser.add_argument(
        "--transformers", nargs="+", default=TRANSFORMERS, help="columns; default: all"
    )
    parser.add_argument(
        "--cache", type=Path, default=default, help="folder of environments and results"
    )
    parser.add_argument("--again", action="store_true", help="run cells that have a result, too")
    parser.add_argument(
        "--keep", action="store_true", help="keep a row's environment, and use it where it is there"
    )
    parser.add_argument(
        "--no-write",
        dest="write",
        action="store_false",
        help=f"leave {TABLE.relative_to(ROOT)} alone",
    )
    return parser.parse_args()


# ------------------------------------------------------------ one row


def _row(
    torch: str, wanted: list[str], results: dict[str, Any], options: argparse.Namespace
) -> None:
    """Test one torch: install it, build ORT's extensions, try each transformers with it."""
    row = results[torch] = {"cells": {}, **results.get(torch, {})}
    environment = options.cache / f"torch-{torch}"
    try:
        problem = _install_torch(environment, torch, row) or _set_up(environment, row)
        for transformers in wanted:
            row["cells"][transformers] = (
                {"error": problem} if problem else _cell(environment, transformers)
            )
            # After each cell, so that an interrupted run loses at most one.
            _write(options.cache, results)
    finally:
        if not options.keep:
            shutil.rmtree(environment, ignore_errors=True)


def _install_torch(environment: Path, torch: str, row: dict[str, Any]) -> str:
    """Install torch and its companions; return the reason of a failure, else ""."""
    if not (environment / "bin" / "python").exists():
        free = shutil.disk_usage(environment.parent).free
        if free < ENOUGH_DISK:
            raise SystemExit(
                f"{environment.parent} has {free / 1e9:.0f} GB free, and a torch with CUDA "
                "takes 6-9"
            )
        subprocess.run([_python(), "-m", "venv", environment], check=True)
    requirements = [*_pins(), *OTHERS]
    problem = _pip(environment, f"torch=={torch}", *requirements)
    # The exact patch may not exist for this Python or platform; pip's message has those that do.
    newest = _newest_patch(torch, problem)
    if newest:
        problem = _pip(environment, f"torch=={newest}", *requirements)
    if not problem:
        row["torch"] = newest or torch
    return problem


def _set_up(environment: Path, row: dict[str, Any]) -> str:
    """Build ORT's torch extensions; return the reason of a failure, else ""."""
    start = time.monotonic()
    module = "ortmodule._internal.native.extensions"
    code = (
        f"import ortmodule, {module} as e; s = ortmodule.setup(); "
        "print(e.reason_interop_is_unbuildable_or_empty()[-300:]); raise "
        "SystemExit(s)"
    )
    done = _run(environment, "-c", code, timeout=900)
    # With --keep the extensions may be built already, which takes no time: the longest one counts.
    row["setup_seconds"] = max(round(time.monotonic() - start), row.get("setup_seconds", 0))
    row["setup"] = done.stdout.strip().splitlines()[-1:] if "without" in done.stdout else []
    return "" if done.returncode == 0 else f"setup: {_last_line(done.stderr)}"


def _cell(environment: Path, transformers: str) -> dict[str, Any]:
    """Return the result of every check with this transformers."""
    problem = _pip(environment, f"transformers=={transformers}", *_pins(), "peft")
    if problem:
        return {"error": problem}
    return {check: _check(environment, check) for check in CHECKS}


def _check(environment: Path, check: str) -> dict[str, Any]:
    try:
        done = _run(environment, str(ROOT / "tools" / "matrix_cell.py"), check, timeout=300)
    except subprocess.TimeoutExpired:
        return {"refused": "no answer within 300 s"}
    # Libraries may print other lines before the result.
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        return {"refused": f"exit status {done.returncode}: {_last_line(done.stderr)}"}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer


# ------------------------------------------------------------ its environment


def _python() -> str:
    return subprocess.run(
        [ROOT / "tools" / "find-python"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def _pins() -> list[str]:
    lines = (ROOT / "constraints" / "torch-2.13.txt").read_text().splitlines()
    # Not torch, transformers and their dependencies, which are the axes of the table.
    return [line for line in lines if line.partition("==")[0] in PINNED]


def _pip(environment: Path, *requirements: str) -> str:
    """Install packages; return the reason of a failure, else ""."""
    command = [
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-cache-dir",  # several torches of gigabytes would stay in it
        *requirements,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return "" if done.returncode == 0 else (" ".join(errors) or _last_line(done.stderr))


def _newest_patch(torch: str, problem: str) -> str:
    """Return the newest patch of the same minor version that pip suggests, else ""."""
    minor = torch.rpartition(".")[0]
    patches = re.findall(
        rf"(?<![\d.]){re.escape(minor)}\.(\d+)(?![\w.])", problem.partition("from versions:")[2]
    )
    return f"{minor}.{max(map(int, patches))}" if patches else ""


def _run(environment: Path, *arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    values = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "ortmodule/src")]),
        # Extensions are built for one torch, so each environment has its own cache.
        "ORT_EXTENSIONS_DIR": str(environment / "extensions"),
    }
    command = [str(environment / "bin" / "python"), *arguments]
    return subprocess.run(
        command,
        env=values,
        cwd=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1][:300]


# ------------------------------------------------------------ the table


def _read(cache: Path) -> dict[str, Any]:
    file = cache / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return results


def _write(cache: Path, results: dict[str, Any]) -> None:
    # Replaced atomically: hours of results must survive an interruption.
    arriving = cache / "results.json.new"
    arriving.write_text(json.dumps(results, indent=1))
    arriving.replace(cache / "results.json")


def _passed(answer: dict[str, Any]) -> bool:
    return "refused" not in answer and all(answer[name] <= limit for name, limit in LIMITS.items())


def _told(row: dict[str, Any], transformers: str) -> str:
    """Return a cell as one line: checks that pass with their difference, then failures."""
    cell = row["cells"].get(transformers)
    if cell is None:
        return "not run"
    if "error" in cell:
        return f"not installed: {cell['error']}"
    ran = {check: answer for check, answer in cell.items() if "refused" not in answer}
    lines = []
    if ran:
        differences = ", ".join(
            f"{name} {max(answer[name] for answer in ran.values()):.0e}" for name in LIMITS
        )
        passed = [CHECKS[check] for check, answer in ran.items() if _passed(answer)]
        lines.append(
            f"{'ok' if len(passed) == len(CHECKS) else 'ok: ' + ', '.join(passed)} "
            f"(differences: {differences})"
        )
    lines += [f"{CHECKS[c]} differs: {a}" for c, a in ran.items() if not _passed(a)]
    lines += [
        f"{CHECKS[check]} refused: {answer['refused']}"
        for check, answer in cell.items()
        if "refused" in answer
    ]
    return "; ".join(lines)


def _table(results: dict[str, Any]) -> str:
    columns = sorted({name for row in results.values() for name in row["cells"]}, key=_order)
    lines = [
        "# Versions that engine `ort` was run on",
        "",
        (
            "Written by `make matrix` (tools/matrix.py): each cell installs the pair, runs "
            "`ortlaunch setup`, and trains a"
        ),
        f"small {', '.join(CHECKS.values())} on ORT 1.19.2 and in eager PyTorch.",
        (
            "Differences are relative: of the losses of four AdamW steps; of the first step's "
            "gradients, to the largest."
        ),
        "",
        "| torch | setup | " + " | ".join(f"transformers {name}" for name in columns) + " |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for torch in sorted(results, key=_order):
        row = results[torch]
        setup = " ".join(
            [f"{row['setup_seconds']} s" if "setup_seconds" in row else "", *row.get("setup", [])]
        )
        cells = [_told(row, name).replace("|", "\\|").replace("\n", " ") for name in columns]
        lines.append(f"| {row.get('torch', torch)} | {setup} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


if __name__ == "__main__":
    sys.exit(main())
