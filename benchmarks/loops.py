"""One training loop of the contest: ours on any engine, bare loops, Trainer, accelerate +
DeepSpeed.

python benchmarks/loops.py CONTESTANT SHAPE STEPS_A_TURN ['{"lora": true}']
    (benchmarks/peers.py starts these)

All train the same model from the same seed on the same batches with the same optimizer and
clipping.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contest import Gate

LENGTH = 128
SEED = 7
RATE = 1e-4
NORM = 1.0
NEVER = 10**6  # steps; the race ends the process before
LORA = {"r": 8, "alpha": 32, "target_modules": ["q_proj", "v_proj"]}


def size(shape: str, small: bool, vocabulary: int) -> dict[str, Any]:
    """Return a config of 4 layers: BERT-base's, or a Llama of the same width."""
    wide = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4} if small else {
        "hidden_size": 768, "intermediate_size": 3072 if shape == "bert" else 2048, "num_attention_heads": 12,
    }  # fmt: skip
    return {"model_type": shape, **wide, "num_hidden_layers": 4, "vocab_size": vocabulary}


def samples(shape: str, vocabulary: int, count: int = 512) -> list[dict[str, Any]]:
    """Return random tokens; BERT predicts 15 % of them, Llama all."""
    import torch

    # Every contestant gets the same tokens.
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for _ in range(count):
        ids = torch.randint(5, vocabulary, (LENGTH,), generator=generator)
        labels = (
            ids
            if shape == "llama"
            # -100: cross entropy ignores the label.
            else ids.where(torch.rand(LENGTH, generator=generator) < 0.15, -100)
        )
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def model(options: dict[str, Any]) -> Any:
    """Return the model in plain transformers, with adapters on request."""
    import torch
    import transformers

    shape = options["shape"]
    fields = size(shape, options["small"], options["vocabulary"])
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields, use_cache=False)
    auto = (
        transformers.AutoModelForMaskedLM if shape == "bert" else transformers.AutoModelForCausalLM
    )
    # The same initial weights for every contestant.
    torch.manual_seed(SEED)
    made = auto.from_config(config).train()
    if options["lora"]:
        import peft

        made = peft.get_peft_model(
            made, peft.LoraConfig(r=8, lora_alpha=32, target_modules=LORA["target_modules"])
        )
    return made


def bare(module: Any, gate: Gate, options: dict[str, Any]) -> None:
    """Run the shortest loop that does the same work."""
    import torch

    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    data = samples(options["shape"], options["vocabulary"])
    batch = options["batch"]
    for step in range(NEVER):
        gate.step()
        rows = [data[(step * batch + i) % len(data)] for i in range(batch)]
        loss = module(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def bare_eager(gate: Gate, options: dict[str, Any]) -> None:
    """Run plain PyTorch as users write it."""
    from ortlaunch.worker.model.model import LossModule

    bare(LossModule(model(options)), gate, options)


def bare_ort(gate: Gate, options: dict[str, Any]) -> None:
    """Run ORTModule as Microsoft ships it, with only the patches for today's torch (compat.py)."""
    from ortlaunch.ortmodule.repaired import import_ortmodule

    ortmodule = import_ortmodule()
    from ortlaunch.worker.model.model import LossModule

    bare(ortmodule.ORTModule(LossModule(model(options))), gate, options)


def bare_ours(gate: Gate, options: dict[str, Any]) -> None:
    """Run the shortest loop on our engine's module, to show the cost of our own loop."""
    ours(gate, options, lambda session: bare(session.engine.eval_module, gate, options))


def ours(gate: Gate, options: dict[str, Any], work: Callable[[Any], None] | None = None) -> None:
    """Run ortlaunch's worker on a prepared run folder, with `work` in place of its task."""
    import ortlaunch.worker.tasks.train as loop
    from ortlaunch.planning.world import LaunchOptions
    from ortlaunch.rank import Rank
    from ortlaunch.resolve.prepare import prepare
    from ortlaunch.resolve.resolve import resolve
    from ortlaunch.run_folder.folder import RunDir
    from ortlaunch.worker.__main__ import live
    from ortlaunch.worker.supervision.watchdog import Watchdog

    folder = Path(tempfile.mkdtemp(dir=os.environ["CONTEST_FOLDER"]))
    shape = options["shape"]
    vocabulary = options["vocabulary"]
    task = "masked-lm" if shape == "bert" else "causal-lm"
    config = size(shape, options["small"], vocabulary)
    arguments = {"shape": shape, "vocabulary": vocabulary}
    recipe = {
        "name": "contest", "seed": SEED,
        "model": {"task": task, "config": config},
        "data": {"train": {"format": "custom", "factory": "loops:samples", "arguments": arguments}},
        "batch": {"micro_size": options["batch"], "accumulation_steps": 1},
        "optimizer": {"name": "fused_adam", "learning_rate": RATE}, "schedule": {"name": "constant"},
        "engine": {"name": options["engine"], "matmul_precision": options.get("precision", "highest")},
        "zero": None if options["zero"] is None else {"stage": options["zero"]},
        "train": {"max_steps": NEVER, "max_grad_norm": NORM}, "log": {"every_steps": 10},
    }  # fmt: skip
    if options["lora"]:
        recipe["model"]["lora"] = LORA
    # Beside this module, which the recipe names as the factory of its data.
    path = Path(__file__).parent / f".contest-{os.getpid()}.yaml"
    path.write_text(json.dumps(recipe))
    try:
        resolved = resolve(path, (), LaunchOptions("local", 1, None, None, None), os.environ)
    finally:
        path.unlink()
    run = RunDir(folder / "run")
    prepare(resolved, run)
    # The worker's own loop, with a gate before each step.
    step = loop.train_step

    def gated(*arguments: Any) -> Any:
        gate.step()
        return step(*arguments)

    loop.train_step = gated
    loop.run = work or loop.run
    rank = Rank.from_environ({})
    live(run, rank, Watchdog(rank, run))


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
        train_dataset=samples(options["shape"], options["vocabulary"]),
        callbacks=[Turns()],
    ).train()


def accelerate(gate: Gate, options: dict[str, Any]) -> None:
    """Run Hugging Face accelerate with DeepSpeed, in one process."""
    import deepspeed
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin

    from ortlaunch.worker.engine.stepping import _only_what_training_needs

    # Without it DeepSpeed compiles operators for half a minute, which is not measured here.
    _only_what_training_needs(deepspeed)
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
    loader = torch.utils.data.DataLoader(
        samples(options["shape"], options["vocabulary"]), batch_size=options["batch"]
    )
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
    "trainer": trainer,
    "accelerate": accelerate,
}

if __name__ == "__main__":
    chosen = json.loads(sys.argv[1])
    CONTESTANTS[chosen["loop"]](Gate(chosen["steps"]), chosen)
