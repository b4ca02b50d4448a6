"""Train 20 families of transformers on every engine and by Hugging Face Trainer; draw the chart.

python benchmarks/models.py --out FOLDER                 all that FOLDER has no result of
python benchmarks/models.py --out FOLDER --only bert,t5  these; --again measures them anew
python benchmarks/models.py --out FOLDER --parts race    of race, auto, predict; a later call adds others
python benchmarks/models.py --out FOLDER --show          the table and the chart of what is there

Each model has random weights and is built from a config; shapes of its layers are real, its depth
is 2 to 4 layers. Contestants take turns, A B C D A B C D ..., each in a process of its own
(contest.py), on the same samples with the same optimizer and clipping (loops.py). After the race
`engine: auto` measures the model with empty caches, as a first run does; its choice is judged by
the race. `predict` compares `plan --predict` with short runs. A contestant that fails stays in the
table with its reason. FOLDER gets families.json, after each model, families.md and families.svg;
docs/evidence has these files of README's figures. Only a quiet machine gives figures: a model of
which two turns differ much is listed, to measure it `--again`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contest import Times, race
from peers import LOOPS, SETTINGS

from ortlaunch.base import machine

BASE = "Trainer"
ENGINES = ("eager", "inductor", "ort")
CONTESTANTS: dict[str, dict[str, Any]] = {
    BASE: {"loop": "trainer", "compile": False},
    **{engine: {"loop": "ours", "engine": engine} for engine in ENGINES},
}
# inductor's compilation would take most of the time.
PREDICTED = ("eager", "ort")
# A choice of `engine: auto` within this share of the fastest engine counts as the fastest.
EQUAL = 0.03
# A median above so many times the least turn is that of a busy machine.
NOISY = 1.25
# A prediction within this share of the measurement is right.
NEAR = 0.2
# The share of a run that its measurement may cost.
COST = 0.05
_VIT = {
    "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 6,
}  # fmt: skip
_BERT = {**_VIT, "vocab_size": 8000}
_LLAMA = {
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 2, "num_attention_heads": 8,
    "vocab_size": 8000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LONG = {**_LLAMA, "hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6}
_GROUPED = {**_LLAMA, "num_key_value_heads": 2, "head_dim": 64}
_BART = {
    "d_model": 384, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 6,
    "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536,
    "vocab_size": 8000, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2,
}  # fmt: skip
# (task, batch, tokens, config) by model_type. Tokens are those of the longest sequence; images and
# recordings give their input's name and shape, too. What draws numbers outside torch is off.
CASES: dict[str, tuple[Any, ...]] = {
    "bert": ("masked-lm", 8, 128, _BERT),
    "roberta": ("masked-lm", 4, 256, {**_BERT, "max_position_embeddings": 514}),
    "electra": ("masked-lm", 8, 128, {**_BERT, "embedding_size": 128}),
    "albert": ("masked-lm", 2, 512, {**_BERT, "embedding_size": 128}),
    "deberta-v2": ("masked-lm", 4, 256, {
        **_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False, "type_vocab_size": 0,
    }),
    "modernbert": ("masked-lm", 1, 1024, {
        **_BERT, "intermediate_size": 576, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2,
    }),
    "gpt2": ("causal-lm", 2, 512, {
        "n_embd": 512, "n_layer": 2, "n_head": 8, "vocab_size": 8000, "bos_token_id": 1,
        "eos_token_id": 2,
    }),
    "gpt_neox": ("causal-lm", 2, 512, {**_LLAMA, "intermediate_size": 2048}),
    "opt": ("causal-lm", 4, 256, {
        "hidden_size": 512, "ffn_dim": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
        "vocab_size": 8000, "word_embed_proj_dim": 512,
    }),
    "llama": ("causal-lm", 1, 2048, _LONG),
    "mistral": ("causal-lm", 1, 2048, {**_LONG, "num_key_value_heads": 2, "sliding_window": 512}),
    "qwen3": ("causal-lm", 1, 1024, _GROUPED),
    "gemma3_text": ("causal-lm", 2, 512, {**_GROUPED, "query_pre_attn_scalar": 64}),
    "phi3": ("causal-lm", 8, 128, _LLAMA),
    "t5": ("seq2seq", 8, 128, {
        "d_model": 384, "d_kv": 64, "d_ff": 1536, "num_layers": 2, "num_heads": 6,
        "vocab_size": 8000, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
    }),
    "bart": ("seq2seq", 2, 512, _BART),
    "vit": ("image-classification", 8, 197, {
        **_VIT, "image_size": 224, "patch_size": 16, "num_labels": 10,
    }, ("pixel_values", (3, 224, 224))),
    "swin": ("image-classification", 8, 1764, {
        "image_size": 168, "patch_size": 4, "embed_dim": 96, "depths": [2, 2], "num_heads": [3, 6],
        "num_labels": 10,
    }, ("pixel_values", (3, 168, 168))),
    "whisper": ("speech-seq2seq", 2, 500, {
        **_BART, "num_mel_bins": 80, "max_source_positions": 500, "max_target_positions": 64,
        "apply_spec_augment": False, "suppress_tokens": None, "begin_suppress_tokens": None,
    }, ("input_features", (80, 1000))),
    "wav2vec2": ("ctc", 4, 149, {
        **_BERT, "vocab_size": 64, "conv_dim": [128] * 7, "num_conv_pos_embeddings": 32,
        "layerdrop": 0.0, "apply_spec_augment": False, "pad_token_id": 0,
    }, ("input_values", (48000,))),
}  # fmt: skip


def options_of(name: str) -> dict[str, Any]:
    """Return the options of loops.py for a model."""
    task, batch, length, config, *given = CASES[name]
    case = {"task": task, "length": length, "config": {"model_type": name, **config}}
    if given:
        case["input"] = given[0]
    return {"case": case, "batch": batch, "lora": False, "zero": None, "steps": 3}


# ------------------------------------------------------------------- measuring


def raced(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the result of one model: what was measured where, and every contestant's figures."""
    options = {**options_of(name), "seconds": seconds}
    commands = {
        contestant: [sys.executable, str(LOOPS), json.dumps({**options, **own})]
        for contestant, own in CONTESTANTS.items()
    }
    failed: dict[str, str] = {}
    begun = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    load = os.getloadavg()[0]
    with _fresh() as environ:
        times = race(commands, rounds, environ, failed=failed, together=True)
    figures = {contestant: _figures(found) for contestant, found in times.items()}
    reasons = {each: {"failed": _last_line(text)} for each, text in failed.items()}
    task, batch, tokens, *_ = CASES[name]
    return {
        "task": task, "batch": batch, "tokens": tokens, "config": options["case"]["config"],
        "begun": begun, "rounds": rounds, "load_before": load, "contestants": {**figures, **reasons},
        "environment": environment(),
    }  # fmt: skip


def chosen(name: str) -> dict[str, Any]:
    """Return the choice of `engine: auto` and its cost in seconds, or the reason of its failure."""
    found = _run_loop(name, loop="auto")
    kept = ("chosen", "why", "cost", "starts")
    return found if "failed" in found else {key: found[key] for key in kept}


def predicted(name: str, rounds: int) -> dict[str, Any]:
    """Return predicted and measured seconds and memory of each turn, by engine, or the failure."""
    return _run_loop(name, loop="predict", engines=PREDICTED, rounds=rounds)


def _run_loop(name: str, **options: Any) -> dict[str, Any]:
    """Return the last line of a loop that runs alone, or the reason of its failure."""
    command = [sys.executable, str(LOOPS), json.dumps({**options_of(name), **options})]
    with _fresh() as environ:
        folder = environ["CONTEST_FOLDER"]
        done = subprocess.run(
            command, env=environ, cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode:
        return {"failed": _last_line(done.stderr)}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def _fresh() -> Iterator[dict[str, str]]:
    """Give the environment of contestants: a folder of their own, and nothing compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        yield {**os.environ, **SETTINGS, **caches, "CONTEST_FOLDER": folder}


def _figures(found: Times) -> dict[str, Any]:
    return {
        "median": found.median, "least": min(found.turns), "most": max(found.turns),
        "turns": found.turns, "memory": found.memory,
    }  # fmt: skip


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def environment() -> dict[str, Any]:
    """Return the versions and the machine that the figures depend on."""
    names = ("torch", "transformers", "onnxruntime-training")
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )  # fmt: skip
    found = machine.hardware_record()
    return {
        **{name: _version(name) for name in names}, "ortlaunch": git.stdout.strip() or "unknown",
        "processor": found["processor"], "cores": found["cores"],
    }  # fmt: skip


def _version(name: str) -> str:
    for each in (name, f"{name}-cpu"):
        with contextlib.suppress(PackageNotFoundError):
            return version(each)
    return "not installed"


# --------------------------------------------------------------------- results


def speed_ups(record: Mapping[str, Any]) -> dict[str, float]:
    """Return each engine's speed relative to Trainer, of the engines that trained the model."""
    found = record["contestants"]
    if "failed" in found[BASE]:
        return {}
    return {
        engine: found[BASE]["median"] / found[engine]["median"]
        for engine in ENGINES
        if "failed" not in found[engine]
    }


def table(records: Mapping[str, Any]) -> str:
    """Return the figures of all models as Markdown, then each failure and its reason."""
    names = list(CONTESTANTS)
    seconds = " | ".join(f"{name}, s" for name in names)
    memory = " / ".join(names)
    lines = [
        f"| model, task, batch x tokens | {seconds} | {' / '.join(ENGINES)} x | GiB: {memory} |",
        "|---" * (len(names) + 3) + "|",
    ]
    failures = []
    for model, record in records.items():
        found = record["contestants"]
        ups = speed_ups(record)
        held = " / ".join(_gib(found[name]) for name in names)
        lines.append(
            f"| {model}, {record['task']}, {record['batch']} x {record['tokens']} | "
            f"{' | '.join(_cell(found[name]) for name in names)} | "
            f"{' / '.join(f'{ups[e]:.2f}' if e in ups else '-' for e in ENGINES)} | {held} |"
        )
        failures += [
            f"- {model}, {name}: {found[name]['failed']}"
            for name in names
            if "failed" in found[name]
        ]
    return "\n".join([*lines, *(["", *failures] if failures else [])])


def _cell(figures: Mapping[str, Any]) -> str:
    if "failed" in figures:
        return "failed"
    return f"{figures['median']:.3f} ({figures['least']:.3f} - {figures['most']:.3f})"


def _gib(figures: Mapping[str, Any]) -> str:
    return "-" if "failed" in figures else f"{figures['memory'] / 2**30:.2f}"


def summary(records: Mapping[str, Any]) -> str:
    """Return mean, median and worst of the speed-ups of each engine over Trainer, as Markdown."""
    lines = [
        "| engine | models | geometric mean | arithmetic mean | median | worst | best |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine in ENGINES:
        ups = {name: speed_ups(record).get(engine) for name, record in records.items()}
        known = {name: value for name, value in ups.items() if value is not None}
        if not known:
            continue
        values = list(known.values())
        by_speed = sorted(known, key=known.__getitem__)
        ends = [f"{known[name]:.2f} ({name})" for name in (by_speed[0], by_speed[-1])]
        lines.append(
            f"| {engine} | {len(values)} | {statistics.geometric_mean(values):.2f} | "
            f"{statistics.mean(values):.2f} | {statistics.median(values):.2f} | {' | '.join(ends)} |"
        )
    return "\n".join(lines)


def judged(records: Mapping[str, Any]) -> str:
    """Return how `engine: auto` chose, beside the race, and from how many steps on it pays."""
    lines = [
        "| model | auto chose | of the fastest | cost, s | 5 % of a run from, steps |",
        "|---" * 5 + "|",
    ]
    right = total = 0
    for name, record in records.items():
        auto = record.get("auto")
        if auto is None:
            continue
        total += 1
        if "failed" in auto:
            lines.append(f"| {name} | failed: {auto['failed']} | | | |")
            continue
        found = record["contestants"]
        took = {e: found[e]["median"] for e in ENGINES if "failed" not in found[e]}
        best = min(took, key=took.__getitem__)
        # An engine that the race could not run has no share of the fastest one's speed.
        share = took[best] / took[auto["chosen"]] if auto["chosen"] in took else 0.0
        right += share >= 1 / (1 + EQUAL)
        steps = auto["cost"] / (COST * took[best])
        lines.append(
            f"| {name} | {auto['chosen']} | {share:.0%} of {best} | {auto['cost']:.0f} | {steps:,.0f} |"
        )
    head = f"`engine: auto` chose the fastest engine, or one within {EQUAL:.0%}, for {right} of {total} models."
    return "\n".join([head, "", *lines])


def prediction_table(records: Mapping[str, Any]) -> str:
    """Return the predictions of every model, as multiples of what its runs measured."""
    lines = ["| model | " + " | ".join(PREDICTED) + " |", "|---" * (1 + len(PREDICTED)) + "|"]
    shares: dict[str, list[float]] = {"seconds": [], "memory": []}
    # No prediction can be nearer to runs than runs of the same recipe are to each other.
    turns: dict[str, list[float]] = {"seconds": [], "memory": []}
    for name, record in records.items():
        found = record.get("predict")
        if found is None:
            continue
        if "failed" in found:
            lines.append(f"| {name} | failed: {found['failed']} |" + " |" * (len(PREDICTED) - 1))
            continue
        cells = []
        for engine in PREDICTED:
            missing = next((one for one in found[engine] if one["predicted"] is None), None)
            if missing:
                cells.append(f"not predicted: {missing['not_predicted']}")
                continue
            cell = []
            for kind, field in (("seconds", "step_seconds"), ("memory", "memory")):
                measured = [one[kind] for one in found[engine]]
                middle = statistics.median(measured)
                guess = statistics.median(one["predicted"][field] for one in found[engine])
                shares[kind].append(guess / middle)
                turns[kind] += (one / middle for one in measured)
                cell.append(f"{guess / middle:.2f}")
            cells.append(" / ".join(cell))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    predictions, runs = (
        " and ".join(
            f"{sum(abs(each - 1) <= NEAR for each in found)} of {len(found)} {kind}"
            for kind, found in figures.items()
        )
        for figures in (shares, turns)
    )
    head = (
        "`ortlaunch plan --predict`: seconds / memory, median predicted as a multiple of the median "
        f"measured. Within {NEAR:.0%}: {predictions}. Single runs within {NEAR:.0%} of the median of "
        f"their own recipe: {runs}."
    )
    return "\n".join([head, "", *lines])


def noisy(records: Mapping[str, Any]) -> list[str]:
    """Return the models of which a contestant's median is far above its least turn."""
    return [
        name
        for name, record in records.items()
        if any(
            found["median"] > NOISY * found["least"]
            for found in record["contestants"].values()
            if "failed" not in found
        )
    ]


def page(records: Mapping[str, Any]) -> str:
    """Return families.md: where it was measured, the mean speed-ups, every model, and auto."""
    environments = sorted({json.dumps(record["environment"]) for record in records.values()})
    places = [
        ", ".join(f"{key} {value}" for key, value in json.loads(each).items())
        for each in environments
    ]
    lines = [
        "# Families of transformers on every engine",
        "Made by `python benchmarks/models.py`: seconds a step (median of turns in alternation, least "
        "and most), speed with Hugging Face Trainer (eager PyTorch) = 1, and the most memory of the "
        "process; fp32, forward, backward and AdamW. [families.json](families.json) has every turn and "
        f"config. Measured with {'; '.join(places)}.",
        summary(records),
        table(records),
    ]
    missing = [name for name in CASES if name not in records]
    if missing:
        lines.append(f"Not measured yet: {', '.join(missing)}.")
    if noisy(records):
        lines.append(f"On a busy machine, to be measured again: {', '.join(noisy(records))}.")
    if any("auto" in record for record in records.values()):
        lines.append(judged(records))
    if any("predict" in record for record in records.values()):
        lines.append(prediction_table(records))
    return "\n\n".join(lines) + "\n"


# ----------------------------------------------------------------------- chart

_COLORS = {"eager": "#8a8f98", "inductor": "#d98c2b", "ort": "#2f6fb3"}
_LEFT = 190  # of the plot, in pixels; the names of the models are before it
_WIDTH = 560
_ROW = 20
_TOP = 56


def chart(records: Mapping[str, Any]) -> str:
    """Return the speed-ups as SVG: a row for each model, a dot for each engine.

    The background is transparent, and all colours are readable on white and on black.
    """
    ups = {name: speed_ups(record) for name, record in records.items()}
    ups = dict(sorted(ups.items(), key=lambda item: -item[1].get("ort", 0)))
    values = [value for found in ups.values() for value in found.values()]
    high = max(1.5, *values) + 0.1
    low = min(0.9, *values) - 0.1

    def x(value: float) -> float:
        return _LEFT + _WIDTH * (value - low) / (high - low)

    height = _TOP + _ROW * (len(ups) + 1) + 16
    bottom = height - 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 24} {height}" '
        'font-family="sans-serif" font-size="12" fill="#7a828c">',
        f'<text x="8" y="18">Speed of a training step, Hugging Face Trainer (eager) = 1; '
        f"{_where(records)}</text>",
    ]
    for number, engine in enumerate(ENGINES):
        left = 14 + number * 90
        parts.append(_dot(left, 36, engine) + f'<text x="{left + 10}" y="40">{engine}</text>')
    for tenth in range(int(low * 10) + 1, int(high * 10) + 1):
        # A line at every fifth of the speed, and a strong one at Trainer's.
        if tenth % 2 == 0:
            strong = ' stroke-width="2"' if tenth == 10 else ' stroke-opacity="0.3"'
            parts.append(
                f'<path d="M{x(tenth / 10):.1f} {_TOP - 8}V{bottom}" stroke="#7a828c"{strong}/>'
                f'<text x="{x(tenth / 10):.1f}" y="{bottom + 16}" text-anchor="middle">'
                f"{tenth / 10:.1f}</text>"
            )
    for row, (name, found) in enumerate(ups.items()):
        y = _TOP + _ROW * row + 6
        label = f"{name}, {records[name]['tokens']:,} tokens"
        parts.append(f'<text x="{_LEFT - 12}" y="{y + 4}" text-anchor="end">{label}</text>')
        parts += [
            _dot(x(value), y, engine, f"{name}, {engine}: {value:.2f} x")
            for engine, value in found.items()
        ]
    return "\n".join([*parts, "</svg>", ""])


def _dot(x: float, y: float, engine: str, title: str = "") -> str:
    inside = f"<title>{title}</title>" if title else ""
    return f'<circle cx="{x:.1f}" cy="{y}" r="5" fill="{_COLORS[engine]}">{inside}</circle>'


def _where(records: Mapping[str, Any]) -> str:
    found = next(iter(records.values()))["environment"]
    return f"{found['cores']} cores of {found['processor']}, torch {found['torch']}"


# --------------------------------------------------------------------- command


def _wanted(only: str | None) -> Iterator[str]:
    names = only.split(",") if only else list(CASES)
    for name in names:
        if name not in CASES:
            raise SystemExit(f"--only {name}: unknown; valid: {', '.join(CASES)}")
        yield name


def _save(path: Path, records: Mapping[str, Any]) -> None:
    # An interrupted write must not lose the results so far.
    new = path.with_suffix(".new")
    new.write_text(json.dumps(records, indent=1) + "\n")
    new.replace(path)


def main() -> int:
    """Measure what is missing, and write the results after each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", help="names of models, with a comma")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=2.5, help="the least length of a turn")
    parser.add_argument("--again", action="store_true", help="also models that have a result")
    parser.add_argument("--parts", default="race,auto", help="race, auto, predict, with a comma")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "families.json"
    records: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in [] if options.show else list(_wanted(options.only)):
        begun = time.monotonic()
        kept = {} if options.again else records.get(name, {})
        if "race" in options.parts and "contestants" not in kept:
            records[name] = raced(name, options.rounds, options.seconds)
            _save(path, records)
        parts: dict[str, Callable[[str], dict[str, Any]]] = {
            "auto": chosen,
            "predict": functools.partial(predicted, rounds=options.rounds),
        }
        for part, measure in parts.items():
            if part in options.parts and part not in kept and name in records:
                records[name][part] = measure(name)
                _save(path, records)
        if name in records:
            took = time.monotonic() - begun
            print(f"{table({name: records[name]})}\nin {took:.0f} s", flush=True)
    # The order of CASES, whatever was measured first.
    records = {name: records[name] for name in CASES if name in records}
    if not records:
        raise SystemExit(f"{path}: no results yet")
    _save(path, records)
    (options.out / "families.md").write_text(page(records))
    (options.out / "families.svg").write_text(chart(records))
    print(page(records), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
