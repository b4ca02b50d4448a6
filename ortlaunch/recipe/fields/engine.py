"""The recipe's section `engine`: the engine that runs the model, and every setting of ONNX Runtime.

The docstring under each field is the manual, as in recipe.py. Imports pydantic only.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import Field

from ortlaunch.recipe.fields.section import (
    APPLIED,
    CountOrAuto,
    OperatorsOrWord,
    RowsOrWord,
    Section,
    Text,
    Words,
)


# ORTModule's environment variables for these fields are in ort_variables.py. The fields that need
# CUDA are listed in rules/engine_rules.py.
class Engine(Section, resume_rule=APPLIED):
    """The engine that runs the model."""

    name: Literal["ort", "inductor", "eager", "auto"] = "ort"
    """`ort`: ONNX Runtime's ORTModule. `inductor`: torch.compile. `eager`: plain PyTorch. `auto`:
    the fastest of the three that agrees with plain PyTorch; it is measured before the first
    training (a minute or more) and remembered by model, shape, machine and versions. Fields for ort
    then apply if ort is chosen. Where the measurement would cost more than 5 % of `train.max_steps`
    steps, it is left out, and ort is taken, with allow_fallback; eager, if ort cannot run here. Where
    ONNX Runtime Training is not installed, a recipe that names no engine has auto."""
    allow_fallback: bool = False
    """Let a model that ONNX Runtime cannot run train in eager PyTorch instead; this is printed and
    recorded. False: the run ends before step 1 and prints the reason."""
    # Not a Literal, which would accept true for 1 and 2.0 for 2.
    memory_optimization: Annotated[int, Field(ge=0, le=2)] = 0
    """ort: recompute activations in the backward pass: 1 layer by layer, 2 also where the plan
    becomes slightly less accurate. Saves memory, costs about a forward pass."""
    # The form of each entry is checked in rules/engine_rules.py.
    memory_optimization_config: Words = ()
    """ort: recompute only these subgraphs, as [`cluster:strategy:count`]: strategy 1 recomputes, 2
    recomputes in part, 0 does not recompute; count is the number of them, -1 all. `log_level: info`
    prints the clusters of a model with the bytes each saves. Costs their recomputation. Only with
    `memory_optimization: 0`, because 1 and 2 choose clusters themselves."""
    memory_efficient_grad_management: bool = False
    """ort: store each gradient in its parameter inside the graph as soon as it is computed, instead
    of all at the end. Saves up to a copy of all gradients, costs a Python call for each parameter.
    Needs custom_autograd python, and no DeepSpeed."""
    compute_optimizer: bool = True
    """ort: move slices and gathers before the matmuls that they make smaller. Gain: fewer FLOPs
    where only some tokens count (masked-lm); turn it off only to search for a fault."""
    sparsity_optimizer: bool | None = None
    """ort: leave ignored labels (of cross_entropy) and, on CUDA, padding (an nn.Embedding with
    padding_idx) out of the computation, where the first batch has more than 10 % of them. Gain:
    that share of the head and loss (masked-lm: 85 %) or of the whole pass. Padding needs
    custom_autograd python. null: on, for padding where custom_autograd python is available."""
    print_input_density: bool = False
    """ort: print the density of labels and padding for sparsity_optimizer, in every step. Costs a
    count and a line for each step."""
    custom_autograd: Literal["auto", "python", "inline"] = "auto"
    """ort: handling of a torch.autograd.Function in the model. `python`: it is called from inside
    the graph, forward and backward. `inline`: its forward is exported and ONNX Runtime
    differentiates it: faster, and right only where its backward is the derivative of its forward.
    `auto`: python where torch can load ORT's extension; elsewhere the model is refused."""
    torch_operators: OperatorsOrWord = "auto"
    """ort: operators that torch computes, called from inside ONNX Runtime's graph, with torch's own
    derivative. `auto`: those that have no ONNX form, or whose form ONNX Runtime cannot
    differentiate or computes wrong; attention from 256 x 256 scores of a head on (`model.attention:
    sdpa`, torch's fused kernel); and layers whose buffers its graph would not update. engine.json
    and the end of the run list them with their share of the time. A list: these, as [`softmax`,
    `aten::mul`]. `off`: none; such a model is refused. Needs custom_autograd's extension."""
    torch_modules: Words = ()
    """ort: layers that run entirely in torch inside ONNX Runtime's graph, as [`encoder.router`,
    `*.lstm`], by path or the end of a path, with `*`: for code that cannot be traced (`.item()`,
    decisions on values, hooks, packed sequences). Their outputs must have the same types and
    numbers of dimensions in every batch. Costs ONNX Runtime's gain in these layers."""
    allow_traced_values: bool = False
    """ort: train a model whose forward pass reads values of tensors in Python (`if x.max() > 1`,
    `.item()`). ONNX Runtime's graph keeps these values from the first batch; that is right only
    where they are the same in every batch. False: the run ends before step 1 and names the
    lines."""
    opset: Annotated[int, Field(ge=14, le=18)] | None = None
    """ort: ONNX opset of the export; null: ORTModule's own (17)."""
    parity_steps: CountOrAuto = "auto"
    """ort and inductor: before each of the first N steps, one micro batch of each rank also runs in
    plain PyTorch, on the same weights, with dropout off in both; the loss, every gradient, and the
    weights and buffers that a pass changes are compared (parity.jsonl, engine.json). Training
    itself stays bit for bit the same as without it. Costs two passes for each such step, memory for
    two sets of gradients and a copy of the weights, and for a model with dropout a second export.
    Not with ZeRO 3. With `parallel`, on eager, too: the first step alone, which rank 0 runs on its
    CPU before the model is divided; all gradients are gathered. `auto`: 1 on ort where the model is
    your own (`factory`) or of a family that ortlaunch's tests do not train (other than BERT and
    Llama), with `postprocess`, and with `parallel.tensor_plan` (up to 500 million parameters), else
    0; a model that cannot be compared is trained, and the run reports that."""
    parity_tolerance: Annotated[float, Field(gt=0)] | None = None
    """The run stops, and names the parameters, where the loss, a gradient or a buffer differs by
    more than this: norm of the difference / norm of PyTorch's gradient, or 1 % of the norm of all
    gradients if that is more (fp16, bf16: 5 %). In fp32 a pass in float64 judges such a difference:
    it counts as rounding where the engine is within this of float64 or, for differences of up to 10
    times this, at most 10 times as far from float64 as PyTorch is; it does not count where PyTorch
    itself is further than 0.1 from float64. null: 1e-4 in fp32, 0.05 in fp16, 0.2 in bf16."""
    postprocess: Text | None = None
    """ort: a function of yours, as `package.module:function`, that takes each exported graph (an
    onnx.ModelProto) before its gradients are built, and returns the graph that is trained, with the
    same inputs and outputs. It also gets the evaluation's graph. engine.json has its nodes before
    and after; `parity_steps: auto` then compares step 1 with plain PyTorch, so that a function that
    changes results ends the run."""
    deepcopy_before_export: bool | None = None
    """ort: export from a copy of the model, so that the export's own passes do not change its
    buffers. Costs the bytes of its parameters during the export. null: on, unless twice those bytes
    exceed the free memory."""
    log_level: Literal["verbose", "devinfo", "info", "warning", "error"] = "error"
    """ort: verbosity of ONNX Runtime and the exporter. `warning` adds a table of the features that
    are on, `info` also the memory plans of the graph, `devinfo` and `verbose` pages for ORT's
    developers."""
    save_onnx: Text | None = None
    """ort: folder for rank 0's graphs as ONNX files (exported, optimized, with gradients, as
    executed), for Netron. Relative to the current folder. Costs their size on disk, once."""
    ort_variables: dict[str, int | str] = {}
    """ort, CUDA: variables of ORTModule that have no field here, for every rank, as
    `{ORTMODULE_ENABLE_TUNING: 1}`. None of them was ever tried here on a GPU.
    `ORTMODULE_CONV_ALGO_SEARCH` (HEURISTIC or EXHAUSTIVE: cuDNN's convolutions),
    `ORTMODULE_ENABLE_TUNING` (0 or 1: tunable operators), `ORTMODULE_MAX_TUNING_DURATION_MS`,
    `ORTMODULE_TUNING_RESULTS_PATH` (a folder), `ORTMODULE_PRINT_MEMORY_STATS` (0 or 1),
    `ORTMODULE_USE_EFFICIENT_ATTENTION` (0 or 1: torch's memory-efficient attention in place of
    attention that the model computes step by step, so with `model.attention: eager`),
    `ORTMODULE_USE_TRITON` (0 or 1; needs a build of ONNX Runtime with Triton),
    `ORTMODULE_USE_FLASH_ATTENTION` (0 or 1: a Triton kernel, with `model.attention: eager`),
    `ORTMODULE_TRITON_CONFIG_FILE` (a JSON file), `ORTMODULE_TRITON_DEBUG` (0 or 1)."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Every engine, fp32: precision of float32 matmuls, with torch's names. `highest`: float32.
    `high`: TensorFloat32 (10 bits of mantissa) on CUDA, nothing on a CPU. `medium`: bfloat16 (7
    bits) on a CPU with AMX, two to six times as many matmuls a second; the same as `high` on CUDA.
    With ort it also sets the CUDA provider's TF32 (convolutions included), and on a CPU uses
    torch's matmuls (torch_matmul). Sums, weights, optimizer and rotary positions stay float32.
    Recommended: medium on a CPU with AMX, high on a GPU from Ampere on, where the loss curve is the
    same (`ortlaunch bench --vary engine.matmul_precision=highest,medium` shows both); elsewhere it
    gains nothing and may cost a little, and `plan` prints a note. Parity is always compared at
    highest."""
    onednn: bool | None = None
    """Every engine, CPU, fp32, matmul_precision highest: float32 matmuls by torch's oneDNN instead
    of MKL, also in float32 (measured before step 1; `true` is refused where oneDNN would use
    bfloat16). With ort the matmuls are then torch's (torch_matmul). Gain: on AMD's processors with
    AVX-512 up to twice as fast (Zen 5, two cores: 222 GFLOP/s by MKL, 428 by oneDNN). Cost: each
    small matmul takes some ten microseconds more. null: on for such processors, for a model with a
    weight of 96 x 96 or more. The order of sums differs, and so do the last bits."""
    chunked_loss: RowsOrWord = "auto"
    """Every engine, causal-lm, masked-lm and pretraining: compute head and loss for this many rows
    (tokens) at a time: logits, loss and gradients together, so that the logits of all rows (rows x
    vocabulary) and their gradient never exist at once; rows without a label are left out. The same
    results but for rounding, with less memory. `auto`: on where a micro batch has more logits than
    a chunk, which is 5 million of them on a CPU, 33 million on CUDA. `off`: whole logits, as the
    model computes them. Not with ZeRO 3, nor where a model's loss is not the mean cross entropy of
    a plain linear head (caps on logits, adapters on the head): engine.json records that. Parity is
    always compared with whole logits."""
    torch_matmul: bool | None = None
    """ort, CPU: matmuls with a weight are torch's (MKL, oneDNN or OpenBLAS), called from inside the
    graph of a model with a weight of 64 x 64 or more. Gain: a tenth of a step on Intel's processors
    and 7 to 38 % on AMD's, because ONNX Runtime's threads and torch's compete for the cores. Not
    with memory optimization, which recomputes ONNX Runtime's own matmuls (nor with gradient
    checkpointing, which becomes memory optimization), nor with memory_efficient_grad_management.
    null: on, except with these three."""

    def non_default_setting_lines(self) -> list[str]:
        """Return a line on the settings other than the defaults; none without such."""
        non_default_values = self.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
        settings_text = ", ".join(
            f"{name}: {json.dumps(value)}" for name, value in non_default_values.items()
        )
        return [f"engine {self.name}: {settings_text}"] if non_default_values else []
