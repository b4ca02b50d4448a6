"""The type of a batch in the worker."""

from __future__ import annotations

import torch

TensorBatch = dict[str, torch.Tensor]
"""Tensors by the names of the model's forward, one row a sample."""
