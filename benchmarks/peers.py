"""ortlaunch against its peers on the same model, batches and optimizer, side by side in one run.

python benchmarks/peers.py full       our engines, Hugging Face Trainer (eager, torch.compile), bare loops
python benchmarks/peers.py lora       the same Llama with adapters: eager, stock ORTModule, ours
python benchmarks/peers.py deepspeed  ZeRO 1: accelerate with DeepSpeed, ours on eager and ort

Every contestant lives in its own process and takes turns: A B C A B C ..., medians. Needs the extra `lora` (peft and
accelerate) and nothing else from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from contest import race, table

SETTINGS = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "TOKENIZERS_PARALLELISM": "false"}
LOOPS = Path(__file__).with_name("loops.py")
FULL: dict[str, dict[str, Any]] = {
    "Trainer, eager": {"loop": "trainer", "compile": False},
    "Trainer, torch.compile": {"loop": "trainer", "compile": True},
    "bare PyTorch loop": {"loop": "bare-eager"},
    "bare ORTModule loop": {"loop": "bare-ort"},
    "bare loop, our ORTModule": {"loop": "bare-ours", "engine": "ort"},
    "ortlaunch, eager": {"loop": "ours", "engine": "eager"},
    "ortlaunch, inductor": {"loop": "ours", "engine": "inductor"},
    "ortlaunch, ort": {"loop": "ours", "engine": "ort"},
}
LORA = {
    "bare PyTorch loop": {"loop": "bare-eager"},
    "stock ORTModule": {"loop": "bare-ort"},
    "ortlaunch, eager": {"loop": "ours", "engine": "eager"},
    "ortlaunch, ort": {"loop": "ours", "engine": "ort"},
}
DEEPSPEED = {
    "accelerate, ZeRO 1": {"loop": "accelerate", "zero": 1},
    "ortlaunch, eager, ZeRO 1": {"loop": "ours", "engine": "eager", "zero": 1},
    "ortlaunch, ort, ZeRO 1": {"loop": "ours", "engine": "ort", "zero": 1},
}
RACES = {  # contestants, whom they are measured against, shapes, LoRA
    "full": (FULL, "Trainer, eager", ("bert", "llama"), False),
    "lora": (LORA, "stock ORTModule", ("llama",), True),
    "deepspeed": (DEEPSPEED, "accelerate, ZeRO 1", ("bert", "llama"), False),
}


def main() -> int:
    """Run a race and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("race", choices=RACES)
    parser.add_argument("--shapes", help="bert, llama or both, with a comma")
    parser.add_argument("--only", help="names of contestants, with a semicolon")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="training steps of a turn")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--small", action="store_true", help="a tiny model: to try the script, not to measure")
    options = parser.parse_args()
    contestants, against, shapes, lora = RACES[options.race]
    names = options.only.split(";") if options.only else list(contestants)
    against = against if against in names else names[0]
    for shape in options.shapes.split(",") if options.shapes else shapes:
        base = {"shape": shape, "lora": lora, "zero": None, "batch": options.batch, "small": options.small}
        base["vocabulary"] = options.vocabulary
        commands = {
            name: [sys.executable, str(LOOPS), json.dumps({**base, "steps": options.steps, **contestants[name]})]
            for name in names
        }
        with tempfile.TemporaryDirectory() as folder:
            times = race(commands, options.rounds, {**os.environ, **SETTINGS, "CONTEST_FOLDER": folder})
        what = f"vocabulary {options.vocabulary:,}, {'LoRA, r 8 on q and v' if lora else 'all weights'}"
        print(f"\n{shape}-shaped, hidden 768, 4 layers, batch {options.batch} x 128, {what}, fp32, "
              f"{options.rounds} turns of {options.steps} steps:\n\n{table(times, against)}", flush=True)  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
