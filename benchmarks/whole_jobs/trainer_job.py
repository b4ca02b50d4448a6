"""A job by Hugging Face Trainer, as its users write it.

python trainer_job.py JOB OUT     in the folder that has data/ and models/; JOB is a, b, d or e

The last line that it prints begins with RESULT and is JSON: the last logged loss and, of b, the
accuracy of the last evaluation.
"""

import argparse
import json

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# Model, tokens of a sample, batch, learning rate and steps; b has 2 epochs.
JOBS = {
    "a": ("models/bert256", 128, 32, 5e-4, 150),
    "b": ("models/classifier-base", 64, 16, 1e-4, None),
    "d": ("models/llama256", 256, 16, 1e-3, 40),
    "e": ("models/bert64", 64, 16, 1e-3, 20),
}
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("job", choices=JOBS)
parser.add_argument("out")
parser.add_argument("--learning-rate", type=float)
parser.add_argument("--steps", type=int, help="only so many steps: a warm-up of the caches")
parser.add_argument("--micro-batch", type=int, help="of each of several ranks")
parser.add_argument(
    "--save-at-sigterm", action="store_true", help="and print each step's number, for the sender"
)
parser.add_argument("--resume", action="store_true")
options = parser.parse_args()
folder, length, batch, learning_rate, steps = JOBS[options.job]
steps = options.steps or steps
set_seed(42)
tokenizer = AutoTokenizer.from_pretrained(folder)


def pieces_of_all_texts(rows):
    """Cut the tokens of all texts, one after another, into samples of `length`."""
    end = [tokenizer.eos_token_id] if options.job == "d" else []
    ids = [token for text in tokenizer(rows["text"])["input_ids"] for token in text + end]
    whole = len(ids) // length * length
    return {"input_ids": [ids[start : start + length] for start in range(0, whole, length)]}


extra = {}
if options.job == "b":
    files = {"train": "data/classes-train.jsonl", "evaluation": "data/classes-evaluation.jsonl"}
    data = load_dataset("json", data_files=files)
    names = sorted(set(data["train"]["label"]))
    numbers = {name: number for number, name in enumerate(names)}

    def tokens_and_label_numbers(rows):
        """Tokenize the texts, and number the labels."""
        return {
            **tokenizer(rows["text"], truncation=True, max_length=length),
            "label": [numbers[label] for label in rows["label"]],
        }

    data = data.map(tokens_and_label_numbers, batched=True, remove_columns=["text"])
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=len(names), id2label=dict(enumerate(names)), label2id=numbers
    )
    collate = DataCollatorWithPadding(tokenizer)
    extra = {"eval_strategy": "epoch", "per_device_eval_batch_size": batch}
else:
    # Documents are paragraphs, as in ortlaunch's format text.
    data = load_dataset("text", data_files={"train": "data/text.txt"}, sample_by="paragraph")
    data = data.map(pieces_of_all_texts, batched=True, remove_columns=["text"])
    if options.job == "d":
        data = data.map(lambda rows: {"labels": rows["input_ids"]}, batched=True)
        model = AutoModelForCausalLM.from_pretrained(folder)
        collate = default_data_collator
    else:
        model = AutoModelForMaskedLM.from_pretrained(folder)
        collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
extra |= {"max_steps": steps} if steps else {"num_train_epochs": 2}
arguments = TrainingArguments(
    options.out,
    per_device_train_batch_size=options.micro_batch or batch,
    learning_rate=options.learning_rate or learning_rate,
    weight_decay=0.01,
    warmup_steps=0.1,
    lr_scheduler_type="linear",
    max_grad_norm=1.0,
    logging_steps=10,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    enable_jit_checkpoint=options.save_at_sigterm,
    seed=42,
    disable_tqdm=True,
    dataloader_pin_memory=False,
    **extra,
)


class PrintSteps(TrainerCallback):
    """Prints each step's number, for the signal that stops the job."""

    def on_step_end(self, args, state, control, **_):
        """Print the number of the step that ended."""
        print(f"step {state.global_step}/", flush=True)


def accuracy(prediction):
    """Return the share of right labels."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


trainer = Trainer(
    model,
    arguments,
    train_dataset=data["train"],
    eval_dataset=data.get("evaluation"),
    data_collator=collate,
    processing_class=tokenizer,
    compute_metrics=accuracy if options.job == "b" else None,
    callbacks=[PrintSteps()] if options.save_at_sigterm else None,
)
trainer.train(resume_from_checkpoint=options.resume or None)
trainer.save_model(options.out + "/final")
history = trainer.state.log_history
losses = [entry["loss"] for entry in history if "loss" in entry]
accuracies = [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry]
print("RESULT", json.dumps({"loss": losses[-1:], "accuracy": accuracies[-1:]}), flush=True)
