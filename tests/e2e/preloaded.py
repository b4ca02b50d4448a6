"""Import the libraries that every rank needs.

The import starts no thread, does not initialize CUDA, and reads no run's settings.
"""

from __future__ import annotations

import contextlib
import importlib
import os

DEVICE = os.environ.get("ORTLAUNCH_PRELOADED_FOR", "cpu")
# A forked process cannot use OpenMP threads of its parent.
os.environ.update(
    OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", DS_ACCELERATOR=DEVICE, HF_HUB_OFFLINE="1"
)
# Without it, torch.cuda.is_available() would initialize CUDA, which no fork could use then.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

# After the environment: the libraries read it when they are loaded.
import torch  # noqa: E402

for optional in (
    "deepspeed.runtime.engine",
    "deepspeed.runtime.zero.stage3",
    "onnx",
    "onnxruntime",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(optional)
for name in (
    "torch._inductor.compile_fx",
    "torch.onnx",
    "ortlaunch.cli",
    "ortlaunch.worker.session",
):
    importlib.import_module(name)
importlib.import_module("ortlaunch.worker.tasks.train")

# On a GPU, a step checks for a captured CUDA graph, which may initialize CUDA.
if DEVICE == "cpu":
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    # The first step imports many modules of torch.
    torch.optim.AdamW([weight]).step()
