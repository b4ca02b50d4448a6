"""Whole parameters of a model that the host's memory may not hold: the rest of them lies in files.

Such a parameter is a tensor as any other. The kernel writes its pages to the disk, and reads them
again, as memory is short.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ortlaunch.base import machine
from ortlaunch.worker.patching import replace_attribute_temporarily

# The rest is for what else the rank needs: its parts, a gathered layer, a pass.
_USED_SHARE_OF_FREE_MEMORY = 0.5
_SMALLEST_BYTES_IN_FILE = 1 << 16
_STORAGE_IN_FILE_BY_ADDRESS: dict[int, StorageWeakRef] = {}


class WeightMemory:
    """Keeps tensors in memory up to half of what is free now, and the others in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        free_bytes = machine.memory_limit_with_least_free().free_bytes
        self.memory_bytes_left = int(free_bytes * _USED_SHARE_OF_FREE_MEMORY)
        self._has_told_user = False

    def tensor_in_memory_or_file(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the same values: itself, or one in a file."""
        size = tensor.nbytes
        if size < _SMALLEST_BYTES_IN_FILE or not _is_plain_host_tensor(tensor):
            return tensor
        storage = _STORAGE_IN_FILE_BY_ADDRESS.get(tensor.untyped_storage().data_ptr())
        # Memory that was freed may have the address of a file.
        is_in_file = storage is not None and not storage.expired()
        if is_in_file and tensor.is_contiguous():
            return tensor
        if size <= self.memory_bytes_left and not is_in_file:
            self.memory_bytes_left -= size
            return tensor
        if not self._has_told_user:
            self._has_told_user = True
            print(
                f"whole weights: those for which memory has no room lie in files of {self.folder} for now",
                flush=True,
            )
        in_file = _tensor_in_unnamed_file(self.folder, tensor)
        _STORAGE_IN_FILE_BY_ADDRESS[in_file.data_ptr()] = StorageWeakRef(in_file.untyped_storage())
        return in_file.copy_(tensor.detach())

    @contextlib.contextmanager
    def keep_registered_parameters(self) -> Iterator[None]:
        """Keep the parameters of modules that are built while the context is open."""
        register: Any = nn.Module.register_parameter

        def register_in_memory_or_file(
            module: nn.Module, name: str, parameter: nn.Parameter | None
        ) -> None:
            # Quantized ones have a class and state of their own.
            if type(parameter) is nn.Parameter:
                parameter.data = self.tensor_in_memory_or_file(parameter.data)
            register(module, name, parameter)

        with replace_attribute_temporarily(
            nn.Module, "register_parameter", register_in_memory_or_file
        ):
            yield

    def cast_and_keep_parameters(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        """Keep the new values of a module's parameters in this type; None: in their own."""
        for parameter in module.parameters():
            if type(parameter) is nn.Parameter:
                values = parameter.data
                is_cast = dtype is not None and values.is_floating_point()
                parameter.data = self.tensor_in_memory_or_file(
                    values.to(dtype) if is_cast else values
                )

    @contextlib.contextmanager
    def keep_converted_weights(self) -> Iterator[None]:
        """Keep the weights that transformers converts to the form in which it stores them."""
        try:
            from transformers.core_model_loading import WeightConverter
        # Before version 5 there were no conversions.
        except ImportError:
            yield
            return
        convert: Any = WeightConverter.convert

        def convert_and_keep(converter: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
            values_by_name = convert(converter, *arguments, **options)
            return {
                name: [self.tensor_in_memory_or_file(one) for one in values]
                if isinstance(values, list)
                else self.tensor_in_memory_or_file(values)
                for name, values in values_by_name.items()
            }

        with replace_attribute_temporarily(WeightConverter, "convert", convert_and_keep):
            yield


def _is_plain_host_tensor(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, nn.Parameter)


def _tensor_in_unnamed_file(folder: Path, like: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor whose memory is a file without a name.

    Raises:
        OSError: the disk is full.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            # A full disk would end the process, if it were full only when the values are written.
            os.posix_fallocate(file.fileno(), 0, like.nbytes)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(folder)) from None
        flat = torch.from_file(
            f"/proc/self/fd/{file.fileno()}", shared=True, size=like.numel(), dtype=like.dtype
        )
    return flat.view(like.shape)
