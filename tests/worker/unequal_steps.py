"""One rank that trains a small Llama on samples with unequal numbers of counted labels.

test_unequal_labels.py starts it by torchrun. Arguments: the file to write, an engine, and cases as
MICRO,ZERO,CHUNK, which run one after the other. `reference` trains the whole batch in plain
PyTorch; it shares samples and first weights with the cases, and nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from ortmodule_tests.leaving import leave

GLOBAL = 16
LENGTH = 16
STEPS = 2
RATE = 0.5
CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
          "vocab_size": 64, "max_position_embeddings": LENGTH, "use_cache": False}  # fmt: skip
MICRO_SIZES = (1, 2, 4, 8)
ZERO = ("none", "0", "1", "2", "3")


class Case(NamedTuple):
    """One way to take the same steps."""

    engine: str
    ranks: int
    micro: int
    zero: str
    chunk: str = "off"

    def __str__(self) -> str:
        sharding = (
            f"ZeRO {self.zero}"
            if self.zero != "none"
            else "DDP"
            if self.ranks > 1
            else "no DeepSpeed"
        )
        chunks = "" if self.chunk == "off" else f", chunks of {self.chunk}"
        return (
            f"{self.engine}, {self.ranks} rank{'s' * (self.ranks > 1)}, "
            f"micro size {self.micro}, {sharding}{chunks}"
        )


def cases(engines: tuple[str, ...] = ("eager", "inductor", "ort")) -> Iterator[Case]:
    """Yield every combination; ZeRO 3 with eager alone."""
    for engine, ranks, micro, zero in itertools.product(engines, (1, 2), MICRO_SIZES, ZERO):
        if zero != "3" or engine == "eager":
            yield Case(engine, ranks, micro, zero)


def samples() -> list[dict[str, Any]]:
    """Return prompts of 1 to 16 words, whose labels do not count."""
    import torch

    made = []
    for index in range(GLOBAL):
        ids = torch.randint(
            CONFIG["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(index)
        )
        labels = ids.clone()
        # The last sample has no label that counts.
        labels[: index + 1] = -100
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def model() -> Any:
    """Return the model, with the same weights each time."""
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).train()


def reference() -> dict[str, list[float]]:
    """Return loss and gradient norm of each step over the whole batch, in one pass."""
    import torch

    plain = model()
    rows = samples()
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    found: dict[str, list[float]] = {"loss": [], "norm": []}
    for _ in range(STEPS):
        plain.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        found["loss"].append(loss.item())
        found["norm"].append(
            math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
        )
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(RATE * parameter.grad)
    return found


def steps(case: Case, group: Any) -> dict[str, Any]:
    """Return the same of ortlaunch's training step, and how many passes the engine ran."""
    import torch

    from ortlaunch.worker.data import Batches, UserSamples
    from ortlaunch.worker.engine.engine import build_engine
    from ortlaunch.worker.model.model import LossModule
    from ortlaunch.worker.session import Session
    from ortlaunch.worker.tasks.train import TrainState, train_step
    from tests.makers import host, plan, recipe

    torch._dynamo.reset()
    made = recipe(
        model={"task": "causal-lm", "config": {"model_type": "llama", **CONFIG}},
        batch={"global_size": GLOBAL, "micro_size": case.micro},
        optimizer={"name": "sgd", "learning_rate": RATE},
        schedule={"name": "constant"},
        engine={
            "name": case.engine,
            "chunked_loss": int(case.chunk) if case.chunk.isdigit() else case.chunk,
        },
        zero=None if case.zero == "none" else {"stage": int(case.zero)},
        train={"max_steps": STEPS},
    )
    planned = plan(
        made, [host("localhost", case.ranks)], launcher="torchrun" if case.ranks > 1 else "local"
    )
    batches = Batches(UserSamples(samples()), planned.batch, made.seed)
    trained = LossModule(model())
    engine = build_engine(
        made, planned, trained, group, batches.read_micro_batch_and_count_tokens(0, 0, group.rank)
    )
    nothing: Any = None
    session = Session(made, planned, nothing, group, nothing, batches, trained, engine)
    found: dict[str, Any] = {"loss": [], "norm": []}
    for state in map(TrainState, range(STEPS)):
        loss, stepped, _ = train_step(session, state)
        found["loss"].append(group.mean_over_ranks(float(loss)))
        found["norm"].append(stepped.gradient_norm)
    truth = engine.engine_report_so_far().to_json()
    ran = {
        "ort": lambda: truth["onnxruntime"]["backward_passes"],
        "inductor": lambda: truth["inductor"]["graphs"],
    }
    if case.zero != "none":
        engine.stepper.engine.destroy()  # type: ignore[attr-defined]
    return {**found, "ran": ran.get(case.engine, lambda: 1)()}


def main() -> None:
    """Run every requested case, and write the results on rank 0."""
    file, name, *asked = sys.argv[1:]
    if name == "ort":
        from ortlaunch.worker.engine.ort_settings import import_ortmodule_with_settings
        from tests.makers import recipe

        import_ortmodule_with_settings(recipe(engine={"name": "ort"}).engine)
    import deepspeed
    import torch

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
        micro, zero, chunk = text.split(",")
        case = Case(name, size, int(micro), zero, chunk)
        found[str(case)] = steps(case, group)
        if number == 0:
            print(case, found[str(case)], flush=True)
    if number == 0:
        with open(file, "w", encoding="utf-8") as out:
            json.dump(found, out)
    leave()


if __name__ == "__main__":
    main()
