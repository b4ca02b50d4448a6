"""Run ONNX Runtime's own ORTModule tests on a CPU, with ORTModule as ortlaunch repairs it.

python tools/ort_suite.py FOLDER [FILE]... [--timeout SECONDS]

FOLDER has the files of orttraining/orttraining/test/python of github.com/microsoft/onnxruntime at
tag v1.19.2 (nothing is downloaded). Adapted copies and results are written to FOLDER/cpu. A failure
is expected if a reason below matches it; exit status 1 if one has none. Takes an hour on two
cores.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

TOOLS = Path(__file__).resolve().parent
FILES = tuple(
    f"orttraining_test_{name}.py"
    for name in (
        "hierarchical_ortmodule",
        "ortmodule_onnx_ops",
        "ortmodule_hooks",
        "ortmodule_experimental_json_config",
        "utilities",
        "ortmodule_autograd",
        "ortmodule_fallback",
        "ortmodule_api",
    )
)
HELPERS = ("_orttraining_ortmodule_models.py", "_test_commons.py", "_test_helpers.py")
# Source on CUDA -> on a CPU. A test that is about CUDA itself stays, and fails.
TO_CPU = (
    (
        r'parametrize\("device", \[(?:"cuda", "cpu"|"cpu", "cuda"|"cuda")(, None)?\]',
        r'parametrize("device", ["cpu"\1]',
    ),
    (r'^\s+\["cpu", "cuda"\],?$', '    ["cpu"],'),
    (r'^(\s*)device = "cuda(?::0)?"', r'\1device = "cpu"'),
    (r'(device = )?torch\.device\("cuda(:0)?"\)$', r'\1torch.device("cpu")'),
    (r'device="cuda(?::0)?"|device=torch\.cuda\.current_device\(\)', 'device="cpu"'),
    (r'"cuda"(, is_training=True)', r'"cpu"\1'),
    (r'with_random_shapes\("cuda"\)', 'with_random_shapes("cpu")'),
    (r"torch\.cuda\.(?:synchronize\(\)|manual_seed(?:_all)?\(seed\))", "None"),
    (r'\(x\.detach\(\), "cuda:0",', '(x.detach(), "cpu",'),
    (
        r"(SampleModel\(\)|torch\.randn\(1, 10\)|torch\.FloatTensor\(\[2(?:\.0)?\]\))\.cuda\(\)",
        r"\1",
    ),
    (r"^    (model|xx|y) = \1\.cuda\(\)\n", ""),
    (r'(Foo\(\)|B\(\)|Argument\(D_in, H, D_out\)|dtype=torch\.float\))\.to\("cuda"\)', r"\1"),
    (r"torch\.cuda\.is_bf16_supported\(\)", "False"),
    (
        r"from transformers import AdamW, ",
        "from torch.optim import AdamW\nfrom transformers import ",
    ),
)
# Pattern of a failure's message or test name -> why ortlaunch does not cause it.
REASONS = (
    (r"Timeout", "too slow for the limit"),
    (r"not compiled with CUDA|Found no NVIDIA|cuda|padding_elimination", "needs CUDA"),
    (
        r"runtime_inspector",
        "needs CUDA for embeddings; labels are left out without ORT's hook and its log line",
    ),
    (r"NOT_IMPLEMENTED.*(ConvTranspose|Resize)", "no CPU kernel"),
    (r"GatherElementsGrad.*not found", "torch computes this gradient, faster"),
    (r"pool2d\[MaxPool", "near ties: ORT's gradient is nearer to float64's than torch's"),
    (
        r"overridden_softmax.*atol is 0\.000",
        "a unit of float16's last place: ORT computes it in float32",
    ),
    (r"missing_cpp_extensions", "wants the extensions absent; ours are in the cache folder"),
    (
        r"bert_(?:result|memory)_|positional arguments|labels|config\.json",
        "transformers 5 has another call or file",
    ),
    (r"takes values of tensors into Python", "refused on purpose: engine.allow_traced_values"),
    (r"enable_layerwise_recompute", "gradient checkpoints become recomputation, on purpose"),
    (
        r"save_onnx_models.*inference|eval_onnx_models",
        "eval() with gradients on has a gradient graph, as in eager",
    ),
    (
        r"argmax_unfold|list_dict_input_with_kwargs_and_registered_buffer",
        "rounding: large sums, of which PyTorch is as far from float64's",
    ),
    (
        r"eval_model_mode|pythonop_training_mode",
        "eval() with gradients on has a gradient graph, as in eager",
    ),
    (r"cache_exported_model", "ORTMODULE_CACHE_DIR is not used, on purpose"),
    (
        r"(?:forward pass is given|model returns) <class",
        "a RuntimeError that names the type, not ORT's exception",
    ),
    (r"missing_op|duplicated_warn_message", "torch computes operators that ORT lacks"),
)


def main() -> int:
    """Adapt, run, and print a table and every failure.

    PYTEST_ADDOPTS is pytest's own way to take more options.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--timeout", type=int, default=120, help="of one test, in seconds")
    options = parser.parse_args()
    missing = [name for name in (*options.files, *HELPERS) if not (options.folder / name).is_file()]
    if missing:
        print(f"{options.folder} has no {', '.join(missing)}\n\n{__doc__}", file=sys.stderr)
        return 2
    work = options.folder / "cpu"
    adapt(options.folder, work)
    print(
        "| file | passed | failed | skipped | expected to fail | without a reason "
        "|\n|---|---|---|---|---|---|"
    )
    told = [line for name in options.files for line in run(work, name, options.timeout)]
    print("\n" + "\n".join(told))
    return int(any(line.endswith(": ?") for line in told))


def adapt(originals: Path, work: Path) -> None:
    """Write copies of the tests that run on a CPU."""
    work.mkdir(exist_ok=True)
    for file in originals.glob("*.*"):
        text = file.read_text()
        for found, new in TO_CPU if file.suffix == ".py" else ():
            text = re.sub(found, new, text, flags=re.MULTILINE)
        (work / file.name).write_text(text)


def run(work: Path, name: str, timeout: int) -> list[str]:
    """Run one file, print its row, and return a line for each failure."""
    report = work / f"{name}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        name,
        "-p",
        "ort_suite_plugin",
        "-p",
        "no:cacheprovider",
        "-v",
    ]
    command += [
        "--rootdir",
        ".",
        "-c",
        os.devnull,  # not the configuration of this repository's own tests
        "--timeout",
        str(timeout),
        "--junitxml",
        report.name,
    ]
    # No downloads, and no GPU even if there is one.
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environ["PYTHONPATH"] = f"{TOOLS}{os.pathsep}{TOOLS.parent}"
    with (work / f"{name}.log").open("w") as log:
        subprocess.run(command, cwd=work, env=environ, stdout=log, stderr=log, check=False)
    counts: Counter[str] = Counter()
    told = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        # JUnit's XML has no element for a test that passed.
        if outcome is None or outcome.tag == "skipped":
            counts["passed" if outcome is None else "skipped"] += 1
            continue
        counts["failed"] += 1
        why = reason(f"{case.get('name')}: {outcome.get('message')}")
        counts[why] += 1
        told.append(f"{name} {case.get('name')}: {why}")
    told.sort()
    without = counts["?"]
    row = counts["passed"], counts["failed"], counts["skipped"], counts["failed"] - without, without
    print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)
    return told


def reason(text: str) -> str:
    """Return why a failure is expected; "?" if it is not."""
    # The first matching row wins.
    return next((why for found, why in REASONS if re.search(found, text, re.DOTALL)), "?")


if __name__ == "__main__":
    sys.exit(main())
