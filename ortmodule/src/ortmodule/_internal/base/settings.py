"""Settings of one ORTModule, each with its default. Standard library only.

options.py translates them to ORT's options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ortmodule._internal.errors import SettingError


@dataclass(frozen=True)
class Settings:
    """How one model is exported and run; every setting is ORT's own default, or a better one.

    Messages name a setting as `setting opset`, which a recipe's user knows, too.
    """

    threads: int | None = None
    """CPU threads of each session (training, evaluation); None: torch's number, 0: every core."""
    free_memory_bytes: int | None = None
    """Memory of a CPU's host that an export may take; None: what the kernel calls available."""
    allow_fallback: bool = False
    """Run a model that ONNX Runtime cannot run in plain PyTorch; False: the first pass raises."""
    allow_traced_values: bool = False
    """Export a model that reads tensor values in Python (`.item()`); the first batch's values stay."""
    follow_model_state: bool = True
    """Before each pass, check the model for changes, and export again if it changed.

    Compared with the export are modes, hooks, parts and Python values. False: for a loop in which
    nothing changes them.
    """
    opset: int | None = None
    """ONNX opset of the export; None: ORTModule's own (17)."""
    deepcopy_before_export: bool | None = None
    """Export from a copy of the model; None: where two copies fit into the device's free memory."""
    memory_optimization: int = 0
    """Recompute activations in the backward pass: 1 by layer, 2 also with a small loss of accuracy."""
    memory_optimization_config: Sequence[str] = ()
    """Subgraphs to recompute, as `cluster:strategy:count`."""
    memory_efficient_grad_management: bool = False
    """Accumulate each gradient in its parameter inside the graph, as soon as it is computed."""
    compute_optimizer: bool = True
    """Move slices and gathers before the matmuls that they shrink."""
    sparsity_optimizer: bool | None = None
    """Leave ignored labels and, on CUDA, padding out of the computation; None: on where possible."""
    print_input_density: bool = False
    """Print the density of labels and padding in every step."""
    custom_autograd: Literal["auto", "python", "inline"] = "auto"
    """How a torch.autograd.Function gets into the graph.

    `auto`: called (`python`) where ORT's extension loads.
    """
    torch_operators: Literal["auto", "off"] | Sequence[str] = "auto"
    """Operators that torch runs in ORT's graph; `auto`: those that ORT cannot export or derive."""
    torch_modules: Sequence[str] = ()
    """Layers, by path with `*`, that torch runs as a whole inside ONNX Runtime's graph."""
    # Takes and returns an onnx.ModelProto, which this module must not import.
    postprocess: Callable[[Any], Any] | None = None
    """Changes each exported onnx.ModelProto before its gradients are built; a module's function."""
    torch_matmul: bool | None = None
    """CPU: torch computes products by a matrix; None: yes, except with memory optimization."""
    tf32: bool = False
    """CUDA: TensorFloat32 in matmuls and convolutions."""
    log_level: Literal["verbose", "devinfo", "info", "warning", "error"] = "error"
    """Lowest severity that ONNX Runtime and the exporter log."""
    save_onnx: str | None = None
    """Folder for rank 0's graphs as ONNX files."""

    def __post_init__(self) -> None:
        # Literal types are not checked at run time, and the values may come from a recipe.
        for setting_name, valid_values in _VALID_VALUES.items():
            value = getattr(self, setting_name)
            if value not in valid_values:
                raise SettingError(
                    setting_name,
                    f"got {value!r}; it must be one of {', '.join(map(str, valid_values))}",
                )
        if isinstance(self.torch_operators, str) and self.torch_operators not in ("auto", "off"):
            raise SettingError(
                "torch_operators",
                f"got {self.torch_operators!r}; it must be auto, off or a list of names",
            )
        if isinstance(self.torch_modules, str):
            raise SettingError(
                "torch_modules", f"got {self.torch_modules!r}; it must be a list of paths"
            )


_VALID_VALUES: dict[str, tuple[object, ...]] = {
    "opset": (None, 14, 15, 16, 17, 18),
    "memory_optimization": (0, 1, 2),
    "custom_autograd": ("auto", "python", "inline"),
    "log_level": ("verbose", "devinfo", "info", "warning", "error"),
}


def module_and_qualified_name_text(function_or_callable: Callable[..., object]) -> str:
    """Return `module:function`; of a callable object, its class."""
    named_object = (
        function_or_callable
        if hasattr(function_or_callable, "__qualname__")
        else type(function_or_callable)
    )
    return f"{named_object.__module__}:{named_object.__qualname__}"
