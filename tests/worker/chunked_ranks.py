"""One rank of two: a training step with a chunked loss, compared with float64.

test_chunked_loss_ranks.py starts it by torchrun. Arguments: the file to write, and cases as
ENGINE,ZERO,FAMILY.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ortmodule_tests.leaving import leave

LENGTH = 16
ROWS = 8
# So high that a step of SGD leaves the gradient in the weights, with little rounding.
RATE = 1e4
MICRO = 2
SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
         "intermediate_size": 48, "max_position_embeddings": LENGTH}  # fmt: skip
OWN = {
    "llama": {"use_cache": False},
    "llama-tied": {"use_cache": False, "tie_word_embeddings": True},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}
TASKS = {"llama": "causal-lm", "llama-tied": "causal-lm", "bert": "pretraining"}


def samples(count: int, family: str) -> list[dict[str, Tensor]]:
    """Return samples in which two of three labels count; for BERT also a sentence pair's label."""
    made = []
    for index in range(count):
        ids = torch.randint(
            SIZES["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(index)
        )
        labels = ids.clone()
        labels[2::3] = -100
        pair = {"next_sentence_label": torch.tensor(1)} if family == "bert" else {}
        made.append(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **pair}
        )
    return made


def model(family: str) -> nn.Module:
    """Return the model, with the same weights each time."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.partition("-")[0], **SIZES, **OWN[family])
    kind = (
        transformers.AutoModelForPreTraining
        if family == "bert"
        else transformers.AutoModelForCausalLM
    )
    made: nn.Module = kind.from_config(config, attn_implementation="eager")
    return made.train()


def exact(family: str, rows: list[dict[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients from unchunked logits in float64."""
    plain = model(family).double()
    loss = plain(**{name: torch.stack([row[name] for row in rows]) for name in rows[0]}).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def step(engine_name: str, zero: str, family: str, group: Any) -> dict[str, Any]:
    """Return the relative differences of the loss and of each gradient, and facts of the run."""
    from ortlaunch.worker.data import Batches, UserSamples
    from ortlaunch.worker.engine.engine import build_engine
    from ortlaunch.worker.model.model import LossModule
    from ortlaunch.worker.session import Session
    from ortlaunch.worker.tasks.train import TrainState, train_step
    from tests.makers import host, plan, recipe

    torch._dynamo.reset()
    made = recipe(
        model={"task": TASKS[family], "config": {"model_type": family.partition("-")[0], **SIZES}},
        batch={"global_size": MICRO * group.size, "micro_size": MICRO},
        optimizer={"name": "sgd", "learning_rate": RATE},
        schedule={"name": "constant"},
        engine={"name": engine_name, "chunked_loss": ROWS},
        zero=None if zero == "none" else {"stage": int(zero)},
        train={"max_steps": 1},
    )
    planned = plan(made, [host("localhost", group.size)], launcher="torchrun")
    rows = samples(MICRO * group.size, family)
    batches = Batches(UserSamples(rows), planned.batch, made.seed)
    module = model(family)
    before = {name: p.detach().double().clone() for name, p in module.named_parameters()}
    trained = LossModule(module)
    engine = build_engine(
        made, planned, trained, group, batches.read_micro_batch_and_count_tokens(0, 0, group.rank)
    )
    nothing: Any = None
    session = Session(made, planned, nothing, group, nothing, batches, trained, engine)
    loss = train_step(session, TrainState(0)).loss
    true_loss, gradients = exact(family, rows)
    # A step of SGD subtracts RATE times the gradient.
    after = dict(module.named_parameters())
    apart = {
        name: float(
            ((before[name] - after[name].detach().double()) / RATE - gradient).norm()
            / gradient.norm()
        )
        for name, gradient in gradients.items()
        # Smaller gradients are only rounding.
        if gradient.norm() > 1e-3 * max(each.norm() for each in gradients.values())
    }
    truth = engine.engine_report_so_far().to_json()
    found = {
        "loss": abs(group.mean_over_ranks(float(loss)) - true_loss) / true_loss,
        "gradients": apart,
        "rows": truth["chunked_loss"]["rows"],
        "used": truth["engine"]["used"],
        "aten": (truth["onnxruntime"].get("training_graph") or {}).get("aten"),
    }
    if zero != "none":
        engine.stepper.engine.destroy()  # type: ignore[attr-defined]
    return found


def main() -> None:
    """Run every requested case, and write the results on rank 0."""
    file, *asked = sys.argv[1:]
    if any(text.startswith("ort") for text in asked):
        from ortmodule._internal.options import load
        from tests.makers import recipe

        load(recipe(engine={"name": "ort"}).engine)
    import deepspeed

    from ortlaunch.rank import Rank
    from ortlaunch.worker.process_group.distributed import DistributedContext

    # Otherwise its compilation takes half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    number = torch.distributed.get_rank()
    group = DistributedContext(Rank(number, size, number, size), torch.device("cpu"))
    found = {}
    for text in asked:
        engine, zero, family = text.split(",")
        found[text] = step(engine, zero, family, group)
        if number == 0:
            print(text, found[text], flush=True)
    if number == 0:
        with open(file, "w", encoding="utf-8") as out:
            json.dump(found, out)
    leave()


if __name__ == "__main__":
    main()
