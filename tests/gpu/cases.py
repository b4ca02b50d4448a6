"""The GPU cases by part: commands at full size on CUDA or tiny on a CPU, each with its judge.

A case is one command in its own process, usually `ortlaunch train` or `ortlaunch bench`. The cases
of parts `smoke` and `functions` run as forked copies of a process that has loaded the libraries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.gpu import functions, smoke, verdicts
from tests.gpu.verdicts import Ended, Verdict

ROOT = Path(__file__).resolve().parents[2]
# Placeholder in a command; test_gpu.py replaces it by the case's own folder.
FOLDER = "{folder}"
STEPS = 20
PLAIN_CURVE = (
    "import json; from tests.e2e.parity import reference; print(json.dumps(reference({!r}, {!r})))"
)


class Case(NamedTuple):
    """One command, its judge, and the conditions for starting it."""

    part: str
    name: str
    command: tuple[str, ...]
    judge: Callable[[Ended], Verdict]
    # Recipe and overrides whose plan must fit into the card's memory; empty: no check.
    recipe: tuple[str, ...] = ()
    # Commands of ortlaunch to run in forked processes, in place of `command`.
    forked: tuple[smoke.Command, ...] = ()
    # `smoke`, or the recipe whose losses in plain PyTorch are the reference.
    reference: str = ""

    @property
    def key(self) -> str:
        return f"{self.part}: {self.name}"


class Form(NamedTuple):
    """The sizes of all cases: device, ranks, recipes and steps."""

    device: str
    ranks: int
    curves: tuple[str, ...]  # recipes whose loss curves are compared
    stages: tuple[int | None, ...]
    precisions: dict[str, tuple[str, ...]]  # of each engine
    bert: tuple[str, ...]  # recipe and overrides
    llama: tuple[str, ...]
    few_layers: str  # an override for Llama where the head dominates memory and time
    varied: str  # engines of a bench that also varies a key
    matmul: str  # values of engine.matmul_precision
    # Values of engine.chunked_loss; `auto` does not split small logits.
    chunks: str
    steps: int  # measured in a bench

    @property
    def launch(self) -> tuple[str, ...]:
        return f"launch.device={self.device}", f"--nproc-per-node={self.ranks}"


_LORA = "model.lora={r: 8, alpha: 32, target_modules: [q_proj, k_proj, v_proj, o_proj]}"
_ENGINES = ("ort", "inductor", "eager")


def form(device: str, ranks: int) -> Form:
    """Return full sizes for `cuda`, and for `cpu` sizes that take minutes on two cores."""
    if device == "cpu":
        both = ("bf16",)
        return Form(
            device, ranks, ("llama2-7b/tiny",), (1, 2, 3),
            {"eager": both, "inductor": both, "ort": ("fp32", "bf16")},
            bert=("bert-large/tiny", "precision=fp32"), llama=("llama2-7b/tiny", "precision=fp32"),
            few_layers="model.config.num_hidden_layers=1", varied="ort,eager",
            matmul="highest,medium",
            chunks="off,256", steps=2,
        )  # fmt: skip
    both = ("fp16", "bf16")
    bert = 64 * ranks
    llama = 2 * ranks
    return Form(
        device, ranks, ("bert-large/tiny", "llama2-7b/tiny"), (None, 1, 2, 3),
        dict.fromkeys(_ENGINES, both),
        bert=("bert-large/phase1", "data.train=python-docs", f"batch.global_size={bert}",
              "batch.micro_size=64"),
        llama=("llama2-7b/pretrain", "data.train=python-docs",
               "data.tokenizer={train: bpe, vocab_size: 32000}", "data.sequence_length=2048",
               f"batch.global_size={llama}", "batch.micro_size=2", "train.max_steps=100"),
        few_layers="model.config.num_hidden_layers=4", varied=",".join(_ENGINES),
        matmul="highest,high",
        chunks="off,auto", steps=8,
    )  # fmt: skip


def cases(part: str, form: Form) -> list[Case]:
    """Return the cases of one part, in order."""
    return list(PARTS[part](part, form))


def plain_curve(recipe: str, device: str) -> tuple[str, ...]:
    """Return the command that prints plain PyTorch's losses as a JSON list on the last line."""
    return sys.executable, "-c", PLAIN_CURVE.format(recipe, device)


def _recipe(name: str) -> str:
    return str(ROOT / "recipes" / f"{name}.yaml")


def _ortlaunch(verb: str, form: Form, *words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "ortlaunch.cli", verb, *words, *form.launch)


# ----------------------------------------------------------------------- copies of a loaded process


def _forked(part: str, form: Form) -> Iterator[Case]:
    module = smoke if part == "smoke" else functions
    reference = "smoke" if part == "smoke" else ""
    for name, commands, judge in module.commands(form.device):
        yield Case(part, name, (), judge, forked=commands, reference=reference)


# -------------------------------------------------------- loss curves beside those of plain PyTorch


def _engine(part: str, form: Form) -> Iterator[Case]:
    """Yield the loss curves of one engine, whose name is the part's."""
    for recipe in form.curves:
        for stage in form.stages:
            for precision in form.precisions[part]:
                yield _curve(part, recipe, form, part, stage, precision)


def _curve(
    part: str, recipe: str, form: Form, engine: str, stage: int | None, precision: str, *more: str
) -> Case:
    from tests.e2e.parity import overrides

    zero = "zero=null" if stage is None else f"zero={{stage: {stage}}}"
    # See LOW_SCALE: DeepSpeed's own first scale would skip steps.
    scale = (smoke.LOW_SCALE,) if stage is not None and precision == "fp16" else ()
    settings = (
        *overrides(recipe),
        f"engine={{name: {engine}}}",
        zero,
        *scale,
        f"precision={precision}",
        *more,
    )
    command = _ortlaunch("train", form, _recipe(recipe), *settings, f"--run-dir={FOLDER}/run")
    name = ", ".join(
        [recipe, "no DeepSpeed" if stage is None else f"ZeRO {stage}", precision, *more]
    )
    return Case(part, name, command, partial(verdicts.curve, engine, precision), reference=recipe)


# ---------------------------------------------------------------------------- measured side by side


def _bench(
    case: tuple[str, str], form: Form, recipe: tuple[str, ...], check: verdicts.Check, *, engines: str = "",
    vary: str = "",
) -> Case:  # fmt: skip
    """Return a case of `ortlaunch bench` that measures its variants one by one on the card."""
    recipe = _recipe(recipe[0]), *recipe[1:]
    engines = engines or (form.varied if vary else ",".join(_ENGINES))
    length = (
        "--rounds=1",
        f"--steps={form.steps}",
        "--one-at-a-time",
        f"--out={FOLDER}/bench",
    )
    varied = (f"--vary={vary}",) if vary else ()
    command = _ortlaunch("bench", form, *recipe, f"--engines={engines}", *varied, *length)
    return Case(*case, command, partial(verdicts.bench, check), recipe)


def _deepspeed(part: str, form: Form) -> Iterator[Case]:
    """Yield curves and a bench that compare DeepSpeed's gradient norm with ours."""
    recipe = form.curves[-1]
    for precision in form.precisions["eager"]:
        for fused in ("true", "false"):
            yield _curve(
                part, recipe, form, "eager", 2, precision, f"zero.fused_gradient_norm={fused}"
            )
    settings = (*form.bert, "engine={name: eager}", "optimizer.name=fused_adam", "zero={stage: 2}")
    varied = "zero.fused_gradient_norm=true,false"
    yield _bench(
        (part, f"{form.bert[0]}, ZeRO 2"),
        form,
        settings,
        verdicts.modifier_as_asked,
        engines="eager",
        vary=varied,
    )


def _bert(part: str, form: Form) -> Iterator[Case]:
    for precision in ("fp16", "bf16") if form.device == "cuda" else ("fp32",):
        settings = (*form.bert, "engine={name: eager}", f"precision={precision}")
        yield _bench((part, f"{form.bert[0]}, {precision}"), form, settings, verdicts.nothing_more)


def _llama(part: str, form: Form) -> Iterator[Case]:
    """Yield one bench for each engine."""
    # ZeRO's optimizer states of seven billion weights leave no memory for a second engine.
    what = (_LORA,) if part == "lora" else ("model.gradient_checkpointing=true",)
    for engine in _ENGINES:
        precision = "fp32" if form.device == "cpu" else "fp16" if engine == "ort" else "bf16"
        settings = (
            *form.llama,
            *what,
            "zero={stage: 2}",
            f"engine={{name: {engine}}}",
            f"precision={precision}",
        )
        yield _bench(
            (part, f"{form.llama[0]}, {engine}, {precision}"),
            form,
            settings,
            verdicts.nothing_more,
            engines=engine,
        )


def _precision(part: str, form: Form) -> Iterator[Case]:
    settings = (*form.bert, "engine={name: eager}", "precision=fp32")
    vary = f"engine.matmul_precision={form.matmul}"
    yield _bench(
        (part, f"{form.bert[0]}, fp32"), form, settings, verdicts.precision_in_force, vary=vary
    )


def _chunked_loss(part: str, form: Form) -> Iterator[Case]:
    settings = (*form.llama, form.few_layers, "engine={name: eager}", "zero=null", "precision=fp32")
    vary = f"engine.chunked_loss={form.chunks}"
    yield _bench(
        (part, f"{form.llama[0]}, fp32"), form, settings, verdicts.loss_in_chunks, vary=vary
    )


def _recompute(part: str, form: Form) -> Iterator[Case]:
    settings = (*form.bert, "engine={name: eager}", "precision=fp32")
    vary = "model.gradient_checkpointing=false,true"
    yield _bench((part, f"{form.bert[0]}, fp32"), form, settings, verdicts.recomputed, vary=vary)


# --------------------------------------------------------------------------- memory beside the plan


def _memory(part: str, form: Form) -> Iterator[Case]:
    for stage in form.stages:
        precision = "bf16"
        zero = "null" if stage is None else f"{{stage: {stage}}}"
        # In place of the recipe's LAMB, which does not work with ZeRO.
        optimizer = "optimizer.name=fused_adam"
        settings = (
            *form.bert[1:],
            "engine={name: eager}",
            f"zero={zero}",
            f"precision={precision}",
            optimizer,
        )
        recipe = (_recipe(form.bert[0]), *settings, "train.max_steps=3")
        command = _ortlaunch("train", form, *recipe, f"--run-dir={FOLDER}/run")
        name = (
            f"{form.bert[0]}, {'no DeepSpeed' if stage is None else f'ZeRO {stage}'}, {precision}"
        )
        yield Case(part, name, command, verdicts.memory, recipe)


# The most valuable parts first: a borrowed GPU may have to be returned before the end.
PARTS: dict[str, Callable[[str, Form], Iterator[Case]]] = {
    "smoke": _forked,
    "eager": _engine,
    "deepspeed": _deepspeed,
    "functions": _forked,
    "memory": _memory,
    "ort": _engine,
    "bert": _bert,
    "precision": _precision,
    "recompute": _recompute,
    "chunked_loss": _chunked_loss,
    "inductor": _engine,
    "lora": _llama,
    "llama": _llama,
}


def plan_command(case: Case, form: Form) -> tuple[str, ...]:
    """Return the command that prints the planned GPU memory of the case's recipe."""
    return _ortlaunch("plan", form, *case.recipe, "--json")


def planned_bytes(plan: str) -> int | None:
    """Return the bytes of a rank from the output of `ortlaunch plan --json`; None if unknown."""
    memory = json.loads(plan)["memory"]
    return memory and int(memory["by_stage"][memory["chosen"]]["total"])
