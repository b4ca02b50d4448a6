"""Run transformers' own Trainer tests with ORTTrainer, and again with Trainer itself.

python tools/trainer_suite.py FOLDER [FILE]... [-k EXPRESSION] [--timeout SECONDS]

FOLDER has tests/trainer and tests/fixtures of github.com/huggingface/transformers at the installed
version (nothing is downloaded, and tests that need the hub fail or are skipped with both classes).
The tests need the package parameterized. Results are written to FOLDER. A failure that Trainer has,
too, is not ours; another one is expected if a reason below matches it. Exit status 1 if one of ours
has none.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

TOOLS = Path(__file__).resolve().parent
FILES = tuple(
    f"tests/trainer/test_trainer{part}.py"
    for part in ("", "_seq2seq", "_callback", "_jit_checkpoint")
)
# Pattern of a failure's message or test name -> why it is on purpose.
REASONS = (
    (r"draws numbers with Python's random", "refused on purpose: the graph would repeat a number"),
    (r"test_save_best_checkpoint", "ort_report.json is one file more in the output folder"),
    (r"Timeout", "too slow for the limit: each ORTTrainer exports its model"),
)


def main() -> int:
    """Run both classes, and print a table and every failure that only ORTTrainer has."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("-k", default="", help="pytest's selection of tests")
    parser.add_argument("--timeout", type=int, default=120, help="of one test, in seconds")
    options = parser.parse_args()
    missing = [name for name in options.files if not (options.folder / name).is_file()]
    if missing:
        print(f"{options.folder} has no {', '.join(missing)}\n\n{__doc__}", file=sys.stderr)
        return 2
    stock, ours = (run(options, plugin) for plugin in (None, "trainer_suite_plugin"))
    print("| class | passed | skipped | failed |\n|---|---|---|---|")
    for name, results in (("Trainer", stock), ("ORTTrainer", ours)):
        outcomes = [outcome for outcome, _ in results.values()]
        row = (outcomes.count(outcome) for outcome in ("passed", "skipped", "failed"))
        print(f"| {name} | {' | '.join(map(str, row))} |")
    lines = [
        f"{name}: {reason(f'{name}: {message}')}"
        for name, (outcome, message) in sorted(ours.items())
        if outcome == "failed" and stock.get(name, ("", ""))[0] != "failed"
    ]
    print("\nFailed with ORTTrainer alone:\n" + "\n".join(lines or ["none"]))
    others = [
        f"{name}: {stock[name][1][:200]!r}; ORTTrainer: {message[:200]!r}"
        for name, (outcome, message) in sorted(ours.items())
        if outcome == "failed" == stock.get(name, ("", ""))[0]
        and plain(message) != plain(stock[name][1])
    ]
    print("\nFailed with both, for another reason:\n" + "\n".join(others or ["none"]))
    log = (options.folder / "trainer_suite_plugin.log").read_text(encoding="utf-8")
    counts = re.findall(r"^ORTTrainer: \{.*by ONNX Runtime.*", log, re.MULTILINE)
    print(f"\n{counts[-1] if counts else 'NOTHING RAN IN ONNX RUNTIME'}")
    return int(not counts or any(line.endswith(": ?") for line in lines))


def run(options: argparse.Namespace, plugin: str | None) -> dict[str, tuple[str, str]]:
    """Run the tests, and return their outcomes."""
    report = options.folder.resolve() / f"{plugin or 'stock'}.xml"
    command = [sys.executable, "-m", "pytest", *options.files, "-p", "no:cacheprovider", "-v"]
    command += ["--rootdir", ".", "-c", os.devnull, "--junitxml", str(report)]
    command += ["--timeout", str(options.timeout), *(["-k", options.k] if options.k else [])]
    command += ["-p", plugin] if plugin else []
    # No downloads, and no GPU even if there is one.
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = [str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(
            command, cwd=options.folder, env=environ, stdout=log, stderr=log, check=False
        )
    return read(report)


def read(report: Path) -> dict[str, tuple[str, str]]:
    """Return (outcome, message) of each test by name."""
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failure = next((part for part in case if part.tag in ("failure", "error")), None)
        # JUnit's XML has no element for a test that passed.
        skipped = case.find("skipped") is not None
        outcome = "failed" if failure is not None else "skipped" if skipped else "passed"
        message = str(failure.get("message")) if failure is not None else ""
        results[f"{case.get('classname')}.{case.get('name')}"] = outcome, message
    return results


def plain(message: str) -> str:
    """Return a message without the names of our classes, addresses and temporary folders."""
    return re.sub(r"\bORT(?=Trainer|TrainingArg|Seq2Seq)|0x[0-9a-f]+|/tmp/\S+", "", message)


def reason(text: str) -> str:
    """Return why a failure is expected; "?" if it is not."""
    # The first matching row wins.
    return next((why for pattern, why in REASONS if re.search(pattern, text, re.DOTALL)), "?")


if __name__ == "__main__":
    sys.exit(main())
