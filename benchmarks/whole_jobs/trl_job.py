"""A job by TRL's SFTTrainer, packed: python trl_job.py JOB OUT, as trainer_job.py; JOB is c or d."""

import argparse
import json

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("job", choices=["c", "d"])
parser.add_argument("out")
parser.add_argument("--steps", type=int, help="only so many steps: a warm-up of the caches")
options = parser.parse_args()
common = {
    "output_dir": options.out,
    "learning_rate": 1e-3,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "logging_steps": 10,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "seed": 42,
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "packing": True,
}
if options.job == "c":
    data = load_dataset("json", data_files="data/chats.jsonl", split="train")
    arguments = SFTConfig(
        **common,
        max_length=512,
        assistant_only_loss=True,
        per_device_train_batch_size=8,
        weight_decay=0.0,
        num_train_epochs=2,
        max_steps=options.steps or -1,
    )
    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
    )
    trainer = SFTTrainer("models/llama-base", args=arguments, train_dataset=data, peft_config=lora)
else:
    data = load_dataset("text", data_files="data/text.txt", sample_by="paragraph", split="train")
    arguments = SFTConfig(
        **common,
        max_length=256,
        packing_strategy="wrapped",
        per_device_train_batch_size=16,
        weight_decay=0.01,
        max_steps=options.steps or 40,
    )
    trainer = SFTTrainer("models/llama256", args=arguments, train_dataset=data)
trainer.train()
if options.job == "c":
    # As ortlaunch's export: the whole model, with the adapters merged into it.
    merged = trainer.model.merge_and_unload()
    merged.save_pretrained(options.out + "/final")
    trainer.processing_class.save_pretrained(options.out + "/final")
else:
    trainer.save_model(options.out + "/final")
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("RESULT", json.dumps({"loss": losses[-1:], "accuracy": []}), flush=True)
