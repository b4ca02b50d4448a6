"""One training loop of the contest: ours on any engine, bare loops, Trainer, accelerate +
DeepSpeed.

python benchmarks/loops.py OPTIONS    as JSON (benchmarks/peers.py and models.py start these)

All train the same model from the same seed on the same batches with the same optimizer and
clipping.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contest import Gate

if TYPE_CHECKING:
    from ortlaunch.resolve.resolve import ResolvedRun

LENGTH = 128
SEED = 7
RATE = 1e-4
NORM = 1.0
NEVER = 10**6  # steps; the race ends the process before
PREDICTED_STEPS = 8  # of a run whose prediction is compared
# transformers' class for each task.
CLASSES = {
    "masked-lm": "AutoModelForMaskedLM",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "ctc": "AutoModelForCTC",
}
LORA = {"r": 8, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}


def size(shape: str, small: bool, vocabulary: int) -> dict[str, Any]:
    """Return a config of 4 layers: BERT-base's, or a Llama of the same width."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4} if small else {
        "hidden_size": 768, "intermediate_size": 3072 if shape == "bert" else 2048, "num_attention_heads": 12,
    }  # fmt: skip
    return {"model_type": shape, **wide, "num_hidden_layers": 4, "vocab_size": vocabulary}


def case_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return task, config and length of the contest's model: a row of models.py, or a shape."""
    if "case" in options:
        given: dict[str, Any] = options["case"]
        return given
    shape = options["shape"]
    config = size(shape, options["small"], options["vocabulary"])
    return {
        "task": "masked-lm" if shape == "bert" else "causal-lm", "config": config, "length": LENGTH
    }  # fmt: skip


def samples(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Return random samples of a task; a masked-lm predicts 15 % of its tokens, others all."""
    import torch

    # Every contestant gets the same samples.
    generator = torch.Generator().manual_seed(SEED)
    task = case["task"]
    length = case["length"]
    vocabulary = case["config"].get("vocab_size", 0)

    def one() -> dict[str, Any]:
        if "input" in case:
            # An image or a recording; its labels are a class, or words.
            name, shape = case["input"]
            high, long = (10, ()) if task == "image-classification" else (vocabulary, (32,))
            labels = torch.randint(5, high, long, generator=generator)
            return {name: torch.randn(shape, generator=generator), "labels": labels}
        ids = torch.randint(5, vocabulary, (length,), generator=generator)
        labels = ids
        if task == "masked-lm":
            # -100: cross entropy ignores the label.
            labels = ids.where(torch.rand(length, generator=generator) < 0.15, -100)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    return [one() for _ in range(32 if "input" in case else 512)]


def model(options: dict[str, Any]) -> Any:
    """Return the model in plain transformers, with adapters on request."""
    made = from_case(case_of(options)).train()
    if options["lora"]:
        import peft

        made = peft.get_peft_model(
            made, peft.LoraConfig(r=8, lora_alpha=32, target_modules=LORA["target_modules"])
        )
    return made


def from_case(case: dict[str, Any]) -> Any:
    """Return the model of a case in plain transformers, with random weights."""
    import torch
    import transformers

    fields = {**case["config"]}
    if case["task"] in ("masked-lm", "causal-lm"):
        fields["use_cache"] = False
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    # The same initial weights for every contestant.
    torch.manual_seed(SEED)
    return getattr(transformers, CLASSES[case["task"]]).from_config(config)


def bare(module: Any, gate: Gate, options: dict[str, Any]) -> None:
    """Run the shortest loop that does the same work."""
    import torch

    trained = [p for p in module.parameters() if p.requires_grad]
    # Fused ones and those of all tensors do not take mixed kinds of tensors.
    is_mixed = _slices(options)
    ways = {"foreach": False} if is_mixed else {"fused": True}
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, **ways)
    data = samples(case_of(options))
    batch = options["batch"]
    for step in range(NEVER):
        gate.step()
        first = (step * _data_ranks(options) + int(os.environ.get("DATA_RANK", "0"))) * batch
        rows = [data[(first + i) % len(data)] for i in range(batch)]
        loss = module(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        loss.backward()
        # torch has no norm of mixed kinds of tensors.
        if not is_mixed:
            torch.nn.utils.clip_grad_norm_(trained, NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def bare_eager(gate: Gate, options: dict[str, Any]) -> None:
    """Run plain PyTorch as users write it."""
    from ortlaunch.worker.model.model import LossModule

    bare(LossModule(model(options)), gate, options)


def _slices(options: dict[str, Any]) -> bool:
    return bool(options.get("parallel", {}).get("tensor", 1) > 1)


def _data_ranks(options: dict[str, Any]) -> int:
    """Return the number of ranks with samples of their own."""
    return int(options.get("parallel", {}).get("shard", 1))


def fork_second_rank(gate: Gate, options: dict[str, Any]) -> int:
    """Become one of two ranks, of one thread each; the second one takes no turns."""
    port = str(_free_port())
    rank = int(os.fork() == 0)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0", OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo",
        DATA_RANK=str(rank if _data_ranks(options) > 1 else 0),
    )  # fmt: skip
    if rank:
        # It follows the first one through their collectives.
        gate.step = lambda *_: None  # type: ignore[method-assign]
        os.dup2(2, 1)
    import torch

    torch.set_num_threads(1)
    return rank


def bare_fsdp2(gate: Gate, options: dict[str, Any]) -> None:
    """Run a bare loop on two ranks that `fully_shard` divides the model over."""
    fork_second_rank(gate, options)
    import torch
    from torch.distributed.fsdp import fully_shard

    from ortlaunch.worker.model.model import LossModule

    torch.distributed.init_process_group("gloo")
    module = LossModule(model(options))
    for layer in module.model.model.layers:
        fully_shard(layer)
    fully_shard(module)
    bare(module, gate, options)


def accelerate_fsdp2(gate: Gate, options: dict[str, Any]) -> None:
    """Run Hugging Face accelerate with FSDP2 on two ranks."""
    fork_second_rank(gate, options)
    import torch
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )  # fmt: skip
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    module = model(options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, weight_decay=0.0, fused=True)
    loader = torch.utils.data.DataLoader(samples(case_of(options)), batch_size=options["batch"])
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    while True:
        for batch in loader:
            gate.step()
            accelerator.backward(module(**batch).loss)
            accelerator.clip_grad_norm_(module.parameters(), NORM)
            optimizer.step()
            optimizer.zero_grad()


def transformers_tensor(gate: Gate, options: dict[str, Any]) -> None:
    """Run a bare loop on two ranks that transformers slices the layers over."""
    folder = tempfile.mkdtemp(dir=os.environ["CONTEST_FOLDER"])
    model(options).save_pretrained(folder)
    fork_second_rank(gate, options)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from ortlaunch.worker.model.model import LossModule

    torch.distributed.init_process_group("gloo")
    sliced = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=2), dtype=torch.float32
    )
    sliced.config.use_cache = False
    bare(LossModule(sliced.train()), gate, options)


def bare_ort(gate: Gate, options: dict[str, Any]) -> None:
    """Run ORTModule as Microsoft ships it, with only the patches for today's torch (those of its import)."""
    from ortmodule._internal.import_ortmodule import import_ortmodule_with_repairs_and_export_steps

    ortmodule = import_ortmodule_with_repairs_and_export_steps()
    from ortlaunch.worker.model.model import LossModule

    bare(ortmodule.ORTModule(LossModule(model(options))), gate, options)


def bare_ours(gate: Gate, options: dict[str, Any]) -> None:
    """Run the shortest loop on our engine's module, to show the cost of our own loop."""
    ours(gate, options, lambda session: bare(session.engine.eval_module, gate, options))


def ours(gate: Gate, options: dict[str, Any], work: Callable[[Any], None] | None = None) -> None:
    """Run ortlaunch's worker on a prepared run folder, with `work` in place of its task."""
    import ortlaunch.worker.tasks.train as loop
    from ortlaunch.rank import Rank
    from ortlaunch.resolve.prepare import (
        set_aside_and_write_run_files_and_print_plan_unless_restart,
    )
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker.__main__ import join_ranks_and_run_task
    from ortlaunch.worker.supervision.watchdog import Watchdog

    run = RunDir(Path(tempfile.mkdtemp(dir=os.environ["CONTEST_FOLDER"]), "run"))
    set_aside_and_write_run_files_and_print_plan_unless_restart(resolved(options), run)
    # The worker's own loop, with a gate before each step.
    step = loop.train_step

    def gated(*arguments: Any) -> Any:
        gate.step()
        return step(*arguments)

    if options.get("parallel"):
        fork_second_rank(gate, options)
    loop.train_step = gated
    loop.run = work or loop.run
    rank = Rank.from_environ(os.environ if options.get("parallel") else {})
    join_ranks_and_run_task(run, rank, Watchdog(rank, run))


@contextlib.contextmanager
def recipe_of(options: dict[str, Any]) -> Iterator[Path]:
    """Give the contest as a recipe of ortlaunch's, in a file."""
    case = case_of(options)
    made: dict[str, Any] = {"task": case["task"], "config": case["config"]}
    if case["task"] in ("seq2seq", "ctc"):
        # ortlaunch has no such task: the model is a user's own.
        made = {"task": "custom", "factory": "loops:from_case", "arguments": {"case": case}}
    if options["lora"]:
        made["lora"] = LORA
    data = {"format": "custom", "factory": "loops:samples", "arguments": {"case": case}}
    recipe = {
        "name": "contest", "seed": SEED, "model": made, "data": {"train": data},
        "batch": {"micro_size": options["batch"], "accumulation_steps": 1},
        "optimizer": {"name": "fused_adam", "learning_rate": RATE}, "schedule": {"name": "constant"},
        "engine": {"name": options["engine"], "matmul_precision": options.get("precision", "highest")},
        "parallel": options.get("parallel"),
        "zero": None if options["zero"] is None else {"stage": options["zero"]},
        "train": {"max_steps": NEVER, "max_grad_norm": None if _slices(options) else NORM}, "log": {"every_steps": 10},
    }  # fmt: skip
    # Beside this module, which the recipe names as the factory of its data.
    path = Path(__file__).parent / f".contest-{os.getpid()}.yaml"
    path.write_text(json.dumps(recipe))
    try:
        yield path
    finally:
        path.unlink()


def resolved(options: dict[str, Any]) -> ResolvedRun:
    """Return the contest as a run of ortlaunch's."""
    from ortlaunch.planning.world import LaunchOptions
    from ortlaunch.resolve.resolve import load_and_resolve_recipe

    with recipe_of(options) as path:
        ranks, launcher = (2, "torchrun") if options.get("parallel") else (1, "local")
        return load_and_resolve_recipe(
            path, (), LaunchOptions(launcher, ranks, None, None, None), os.environ
        )


def auto(gate: Gate, options: dict[str, Any]) -> None:
    """Have `engine: auto` measure; the last line is its choice, and the seconds of it all."""
    from ortlaunch.bench.auto import measure_engines_and_choose_or_default_if_too_long
    from ortlaunch.run_folder.records import json_values_of_record

    run = resolved({**options, "engine": "auto"})
    begun = time.perf_counter()
    choice = measure_engines_and_choose_or_default_if_too_long(run, print)
    cost = time.perf_counter() - begun
    rows = json.loads(Path(str(choice.bench), "bench.json").read_text())["variants"]
    starts = {
        row["engine"]: row["first_step"]["since_launch"] for row in rows if "first_step" in row
    }
    print(json.dumps({**json_values_of_record(choice), "cost": cost, "starts": starts}))


def predict(gate: Gate, options: dict[str, Any]) -> None:
    """Predict every engine, then train on it, in turns; the last line has every turn, by engine.

    Seconds of a step are the run's median, memory is the run's most bytes beside the libraries. Each
    turn measures the rates of the machine, which change within minutes where it is not quiet.
    """
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options["engines"]}
    with recipe_of({**options, "engine": "eager"}) as path:

        def command(verb: str, *words: str) -> None:
            argv = [sys.executable, "-m", "ortlaunch", verb, str(path), *words]
            if status := subprocess.run(argv, check=False, stdout=sys.stderr).returncode:
                # The command's own message stays the last one.
                sys.exit(status)

        for _ in range(options["rounds"]):
            command("plan", "--predict")
            for engine, turns in found.items():
                run = Path(tempfile.mkdtemp(dir=os.environ["CONTEST_FOLDER"]), engine)
                words = [f"engine.name={engine}", f"train.max_steps={PREDICTED_STEPS}"]
                command("train", *words, f"--run-dir={run}")
                summary = json.loads((run / "summary.json").read_text())
                memory = json.loads((run / "memory.json").read_text())["measured"]["peak"]
                turn = {name: summary.get(name) for name in ("predicted", "not_predicted")}
                turns.append({**turn, "seconds": summary["step_seconds"], "memory": memory})
    print(json.dumps(found))


def trainer(gate: Gate, options: dict[str, Any]) -> None:
    """Run Hugging Face Trainer, eager or with torch.compile."""
    import transformers

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            gate.step()

    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(dir=os.environ["CONTEST_FOLDER"]), per_device_train_batch_size=options["batch"],
        max_steps=NEVER, learning_rate=RATE, lr_scheduler_type="constant", max_grad_norm=NORM, weight_decay=0.0,
        optim="adamw_torch_fused", torch_compile=options["compile"], use_cpu=True, report_to=[], save_strategy="no",
        logging_steps=10, disable_tqdm=True, seed=SEED,
    )  # fmt: skip
    transformers.Trainer(
        model(options),
        arguments,
        train_dataset=samples(case_of(options)),
        callbacks=[Turns()],
    ).train()


def accelerate(gate: Gate, options: dict[str, Any]) -> None:
    """Run Hugging Face accelerate with DeepSpeed, in one process."""
    import deepspeed
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    from ortlaunch.worker.engine.stepping import _disable_deepspeed_shm_muon_compile_and_warnings

    # Without it DeepSpeed compiles operators for half a minute, which is not measured here.
    _disable_deepspeed_shm_muon_compile_and_warnings(deepspeed)
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    # accelerate with DeepSpeed requires a launcher's variables even for one process.
    os.environ.update(alone, MASTER_PORT=str(_free_port()))
    config = {
        "train_micro_batch_size_per_gpu": options["batch"], "gradient_accumulation_steps": 1,
        "gradient_clipping": NORM, "zero_optimization": {"stage": options["zero"]},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": NEVER,
    }  # fmt: skip
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    module = model(options)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    loader = torch.utils.data.DataLoader(samples(case_of(options)), batch_size=options["batch"])
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    # The race ends the process.
    while True:
        for batch in loader:
            gate.step()
            loss = module(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


CONTESTANTS = {
    "ours": ours,
    "bare-eager": bare_eager,
    "bare-ort": bare_ort,
    "bare-ours": bare_ours,
    "auto": auto,
    "predict": predict,
    "trainer": trainer,
    "accelerate": accelerate,
    "bare-fsdp2": bare_fsdp2,
    "accelerate-fsdp2": accelerate_fsdp2,
    "transformers-tensor": transformers_tensor,
}

if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    CONTESTANTS[chosen["loop"]](Gate(chosen["steps"], chosen.get("seconds", 0)), chosen)
