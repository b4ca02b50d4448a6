"""Training by DeepSpeed alone, with none of ortlaunch: `torchrun theirs.py STAGE PRECISION FOLDER`, beside net.py.

Three steps, engine.save_checkpoint, two more; rank 0 writes FOLDER/losses.json and, as zero_to_fp32
finds them, FOLDER/masters.safetensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file


def main(stage: int, precision: str, folder: Path) -> None:
    """All steps; each takes all samples, a share on each rank."""
    from net import data, net  # type: ignore[import-not-found]

    deepspeed.init_distributed("gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model, samples = net(), data()
    config: dict[str, Any] = {
        "train_batch_size": len(samples),
        "train_micro_batch_size_per_gpu": len(samples) // ranks,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    batch = {name: torch.stack([sample[name] for sample in samples[rank::ranks]]).to(dtype) for name in ("x", "y")}
    losses = []
    for step in range(5):
        if step == 3:
            engine.save_checkpoint(str(folder))
        loss = engine(**batch)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / ranks)
    if rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
        if stage:
            masters = get_fp32_state_dict_from_zero_checkpoint(str(folder))
            save_file({name: value.clone() for name, value in masters.items()}, folder / "masters.safetensors")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
