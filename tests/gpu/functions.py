"""Part `functions`: functions that the matrix of engines and precisions does not cover.

The commands run as forked copies, as in part `smoke`. A command with 0 ranks starts its ranks
itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.smoke import LOW_SCALE, Command, differences, failed, losses_of
from tests.gpu.verdicts import SKIPPED, Ended, Verdict, difference, judged

ROOT = Path(__file__).resolve().parents[2]
# _FIRST_LOSS limits the relative difference of the first loss from float32's. Measured on a CPU:
# 8e-5 with float16 weights, 1.3e-3 if the rotary frequencies are float16, too. The wide initial
# weights (initializer_range) make attention depend on positions, as trained weights do.
_POSITIONS = 2048
_FIRST_LOSS = 4e-4
_LONG = (
    f"model.config.max_position_embeddings={_POSITIONS}", "model.config.initializer_range=0.6",
    f"data.sequence_length={_POSITIONS}", "batch={global_size: 2, micro_size: 1}",
    "train.max_steps=1", "data.evaluation=null",
)  # fmt: skip
_PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")
_FLOAT = 1  # onnx.TensorProto.FLOAT
_RESUME = ("--run-dir=again", "--resume=run/checkpoints/step_00000003")


def commands(device: str) -> Iterator[tuple[str, tuple[Command, ...], Any]]:
    """Yield name, commands and judge of each case."""
    # DeepSpeed refuses fp16 on a CPU.
    half = "fp16" if device == "cuda" else "fp32"
    for engine in ("eager", "ort"):
        zero = ("zero={stage: 2}", LOW_SCALE, f"precision={half}", f"engine={{name: {engine}}}")
        graphs = ("engine.save_onnx=graphs",) if engine == "ort" else ()
        plain = _train("cpu", *_LONG, "zero=null", "engine={name: eager}", "--run-dir=plain")
        run = _train(device, *_LONG, *zero, *graphs, "--run-dir=run")
        yield (
            f"{_POSITIONS} positions, {engine}, {half}, ZeRO 2",
            (plain, run),
            partial(positions, engine, half),
        )
    eager = ("engine={name: eager}", "zero=null")
    for name, words in (
        ("saves beside training", ("checkpoint.async=true",)),
        ("worker processes read batches", ("data.workers=2",)),
        ("dropout", ("model.config.attention_dropout=0.2",)),
        (
            "optimizer on the CPU, ZeRO 2",
            ("zero={stage: 2, offload: {optimizer: cpu, pin_memory: true}}",),
        ),
        (
            "weights on the CPU, ZeRO 3",
            ("zero={stage: 3, offload: {optimizer: cpu, parameters: cpu}}",),
        ),
    ):
        runs = (
            _train(device, *eager, *words, "--run-dir=run"),
            _train(device, *eager, *words, *_RESUME),
        )
        yield f"{name}, resumed", runs, resumed
    ort = ("engine={name: ort}", "zero=null", "model.config.attention_dropout=0.2")
    yield (
        "dropout, ort, resumed",
        (_train(device, *ort, "--run-dir=run"), _train(device, *ort, *_RESUME)),
        resumed,
    )
    yield "doctor", ((0, ("doctor", "smoke.yaml", f"--device={device}")),), ends_well
    yield "micro_size: auto", (_largest_batch(device),), largest_batch


def _train(device: str, *words: str) -> Command:
    return 1, ("train", "smoke.yaml", f"launch.device={device}", *words)


def _largest_batch(device: str) -> Command:
    """Return the command that searches the largest micro batch."""
    # On a GPU the search must run out of memory once. Other processes need the CPU's memory.
    auto = ("batch.micro_size=auto", "engine={name: eager}", "train.max_steps=1", "--run-dir=run")
    if device == "cpu":
        return 0, ("train", "smoke.yaml", f"launch.device={device}", *auto)
    recipe = str(ROOT / "recipes/bert-large/phase1.yaml")
    settings = (
        "data.train=python-docs",
        "batch.global_size=4096",
        "precision=bf16",
        f"launch.device={device}",
    )
    return 0, ("train", recipe, *settings, *auto)


# ------------------------------------------------------------------------------------------- judges


def ends_well(ended: Ended) -> Verdict:
    """Check that the exit status is 0."""
    return failed(ended) if ended.status else judged([], [])


def resumed(ended: Ended) -> Verdict:
    """Check that the steps after a resume are equal bit for bit."""
    if ended.status == 2 and "engine ort" in ended.stderr:
        return Verdict(SKIPPED, (ended.last_words,))
    if ended.status:
        return failed(ended)
    run = ended.folder / "run"
    complaints = [f"after the resume: {what}" for what in differences(run, ended.folder / "again")]
    return judged(complaints, [{"last_loss": losses_of(run)[-1]}])


def positions(engine: str, precision: str, ended: Ended) -> Verdict:
    """Check that the first loss is near float32's and that no matmul of a fp16 graph is float32."""
    if ended.status == 2 and engine == "ort" and "engine ort" in ended.stderr:
        return Verdict(SKIPPED, (ended.last_words,))
    if ended.status:
        return failed(ended)
    losses = losses_of(ended.folder / "run")
    largest = difference(losses, losses_of(ended.folder / "plain"))
    complaints = [f"the first loss differs by {largest:.1e}"] if largest > _FIRST_LOSS else []
    if engine == "ort":
        complaints += _products(ended.folder / "graphs", precision)
    return judged(
        complaints, [{"difference": largest, "tolerance": _FIRST_LOSS, "last_loss": losses[-1]}]
    )


def _products(folder: Path, precision: str) -> Iterator[str]:
    """Yield complaints about the input and output types of the graph's matmuls."""
    import onnx

    graph = onnx.load(
        str(next(folder.glob("*execution_model_training.onnx"))), load_external_data=False
    ).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    # Weights are initializers, which the lists of graph values leave out.
    types.update({tensor.name: tensor.data_type for tensor in graph.initializer})
    products = [node for node in graph.node if node.op_type in _PRODUCTS]
    exact = [
        node
        for node in products
        if _FLOAT in [types.get(name) for name in (*node.input, *node.output)]
    ]
    if precision == "fp16" and exact:
        yield f"{len(exact)} of {len(products)} products are float32, such as {exact[0].name}"
    if not products or (precision == "fp32" and len(exact) != len(products)):
        yield f"{len(products)} products, {len(exact)} of them float32, were found"


def largest_batch(ended: Ended) -> Verdict:
    """Check that the search found a size; on a GPU, that a larger one ran out of memory."""
    if ended.status:
        return failed(ended)
    record = json.loads((ended.folder / "run/micro_size.json").read_text())
    out = [one for one in record["tries"] if one["share"] is None]
    complaints = ["no try ran out of memory"] if ended.capability is not None and not out else []
    return judged(
        complaints, [], (f"{record['found']} a micro batch, found in {len(record['tries'])} tries",)
    )
