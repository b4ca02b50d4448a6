"""Import the libraries of every rank, without a thread, CUDA or a run's settings."""

from __future__ import annotations

import contextlib
import importlib
import os

DEVICE = os.environ.get("ORTLAUNCH_PRELOADED_FOR", "cpu")
os.environ.update(
    OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", DS_ACCELERATOR=DEVICE, HF_HUB_OFFLINE="1"
)
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = (
    "1"  # torch.cuda.is_available() would start CUDA for all forks
)

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

if DEVICE == "cpu":  # elsewhere a step checks for a captured CUDA graph, which may start CUDA
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight]).step()  # loads half of torch
