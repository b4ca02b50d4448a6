"""Compare random small programs on engine ort with eager PyTorch in float64: outputs, gradients.

python tools/fuzz_gradients.py --minutes 30 [--first SEED] [--only SEED...] [--cache FOLDER]

A program is one or a few lines of fuzz_operators.py after trained layers, in three batches with
different sizes, among them a size of 1. A third of the programs compute with what a mask selects,
nothing in some of the batches, and also run in evaluation. Two thirds of the programs send their matmuls to torch, as
models of real width do, and a quarter have frozen weights. Its seed determines a program
completely. Results are kept by seed, and a later call continues after them. Every difference is
printed with the shortest program that has it. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from fuzz_operators import FORMS
from torch import nn

Batch = list[torch.Tensor]
SECONDS = 120  # of one program
TEMPLATE = """
import torch, torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.row, self.number = nn.Parameter(torch.randn(6)), nn.Parameter(torch.tensor(0.7))
        self.register_buffer("fixed", torch.randn(6)){layers}

    def forward(self, x, y, mask, ids):
        h, other, row, number, fixed = self.first(x), self.second(y), self.row, self.number, self.fixed
        {body}
        return {result}
"""
# By rank of the value that a program begins with: sizes of x, as letters if they change, and its
# first lines.
STARTS: dict[int, list[tuple[str, str]]] = {
    0: [("B6", "h, other = h.mean(), other.mean()")],
    1: [("B6", "h, other = h[:, 1], other[:, 1]"), ("B6", "h, other = h.mean(0), other.mean(0)")],
    2: [("B6", ""), ("B6", "other = other.mean(-1, keepdim=True)"), ("B6", "other = other.mean()")],
    3: [("BT6", ""), ("BT6", "other = other[:, :1]"), ("BT6", "other = other[0]")],
    4: [("B4H6", ""), ("B4H6", "other = other.mean((2, 3), keepdim=True)"), ("B2T6", "")],
}
# The same with a value that a mask selects.
SELECTED: dict[int, list[tuple[str, str]]] = {
    1: [("B6", "h, other, ids = h[mask, 1], other.expand_as(h)[mask, 1], ids[mask]")],
    2: [
        ("B6", "h, other, ids, mask = h[mask], other.expand_as(h)[mask], ids[mask], mask[mask]"),
        ("BT6", "h, other, ids = h[mask], other.mean(), ids[mask]"),
        (
            "B6",
            "k = mask.nonzero()[:, 0]; h, other, ids, mask = h[k], other.mean(), ids[k], mask[k]",
        ),
    ],
    3: [
        ("BT6", "k = mask[:, 0]; h, other, ids, mask = h[k], other.mean(), ids[k], mask[k]"),
        ("BT6", "h, other = h[:, mask[0]], other.expand_as(h)[:, mask[0]]"),
    ],
    4: [("B4H6", "k = mask[:, 0, 0]; h, other, mask, ids = h[k], other.mean(), mask[k], ids[k]")],
}
# Sizes of each letter. H is larger: its form must survive convolutions and pooling.
POOLS = {"B": (1, 2, 3, 4, 5), "T": (1, 2, 3, 5, 7), "H": (5, 6, 7, 8)}
# Letters in braces of a form -> how the value is drawn, given the rank of `h`.
DRAWN: dict[str, Callable[[random.Random, int], Any]] = {
    "d": lambda r, rank: r.randrange(-rank, rank) if rank else 0,
    "ds": lambda r, rank: tuple(r.sample(range(rank), r.randint(1, max(1, rank)))) if rank else (),
    "b": lambda r, rank: r.random() < 0.5,
    "k": lambda r, rank: r.randint(1, 3),
    "i": lambda r, rank: r.choice((0, -1)),
    "a": lambda r, rank: r.choice((-1.5, -0.5, 0.0, 0.5, 2.0)),
    "p": lambda r, rank: r.choice((0.3, 1.0, 2.5)),
    "e": lambda r, rank: r.choice((1, 2, 3, 4.0)),
    "z": lambda r, rank: r.choice((0, 1, 2, 1.5)),
    "s": lambda r, rank: r.choice((0.5, 1.5, 1.7, 2)),
    "r": lambda r, rank: r.choice(("mean", "sum", "none")),
    "mode": lambda r, rank: r.choice(("reflect", "replicate", "circular")),
    "up": lambda r, rank: r.choice(("nearest", "nearest-exact", "area")),
    "reduce": lambda r, rank: r.choice(("sum", "mean", "prod", "amax", "amin")),
}


@dataclass(frozen=True)
class Program:
    """A program: its forms, as in the table, and its lines of Python."""

    seed: int
    start: tuple[str, str]
    forms: tuple[str, ...]
    lines: tuple[str, ...]
    inside: bool

    @property
    def selects(self) -> bool:
        """Whether the program computes with what a mask selects."""
        return any(self.start in starts for starts in SELECTED.values())

    def source(self) -> str:
        """Return the source of the whole class Net."""
        layers: list[str] = []

        def layer(found: re.Match[str]) -> str:
            layers.append(f"\n        self.layer{len(layers)} = {found[1]}")
            return f"self.layer{len(layers) - 1}"

        lines = [
            re.sub(r"\{L:(.*?)\}\(", lambda found: layer(found) + "(", line) for line in self.lines
        ]
        body = "\n        ".join(line for line in (self.start[1], *lines) if line)
        # Half of the programs compute their loss inside the exported graph.
        mean = "sum" if self.selects else "mean"
        result = f"(h - 0.3).square().{mean}()" if self.inside else "h"
        return TEMPLATE.format(layers="".join(layers), body=body or "pass", result=result)

    def net(self) -> nn.Module:
        scope: dict[str, Any] = {}
        exec(self.source(), scope)
        torch.manual_seed(self.seed)
        net: nn.Module = scope["Net"]()
        for name, parameter in net.named_parameters() if self.seed % 4 == 1 else ():
            # By name: a longer or shorter program has the same frozen weights.
            parameter.requires_grad_(random.Random(f"{self.seed} {name}").random() < 0.4)
        return net

    def batches(self) -> list[Batch]:
        """Return three batches with different sizes; y has sizes of 1 in all of them or in one."""
        rng = random.Random(self.seed + 1)
        torch.manual_seed(self.seed)
        sizes = [{letter: rng.choice(pool) for letter, pool in POOLS.items()} for _ in range(3)]
        # Broadcasting in all batches, and in some only: an export must not fix either.
        always = {letter for letter in POOLS if rng.random() < 0.15}
        made = []
        for at in sizes:
            once = {letter for letter in POOLS if rng.random() < 0.1}
            wide = [at.get(letter) or int(letter) for letter in self.start[0]]
            other = [
                1 if letter in always | once else size for letter, size in zip(self.start[0], wide)
            ]
            mask = torch.rand(*wide[:-1]) > (2.0 if self.selects and rng.random() < 0.4 else 0.3)
            ids = torch.randint(0, 6, wide[:-1])
            made.append([torch.randn(wide), torch.randn(other), mask, ids])
        return made


def program(seed: int) -> Program | None:
    """Return the program of a seed: its form and up to two more; None if eager cannot run it."""
    rows = [line.split(" | ", 1) for line in FORMS.splitlines() if " | " in line]
    # Forms are drawn until eager runs the program with finite gradients.
    for attempt in range(20):
        rng = random.Random(seed * 1000 + attempt)
        ranks, form = rows[seed % len(rows)]
        rank = rng.choice([r for r in STARTS if _may(ranks, r)])
        starts = SELECTED.get(rank, STARTS[rank]) if seed % 3 == 2 else STARTS[rank]
        found = Program(seed, rng.choice(starts), (), (), rng.random() < 0.5)
        wanted = rng.choice((1, 1, 2, 3))
        found = _longer(found, form, rank, rng) or found
        for _ in range(20 if found.forms else 0):
            if len(found.forms) == wanted:
                break
            rank = _rank(found)
            ranks, form = rng.choice(rows)
            found = (_longer(found, form, rank, rng) if _may(ranks, rank) else None) or found
        if found.forms:
            return found
    return None


def _may(ranks: str, rank: int) -> bool:
    return int(ranks[0]) <= rank <= int(ranks[-1])


def _longer(before: Program, form: str, rank: int, rng: random.Random) -> Program | None:
    # A form is an expression, or statements that assign `h` themselves.
    text = re.sub(r"\{(\w+)\}", lambda found: str(DRAWN[found[1]](rng, rank)), form)
    lines = [*text.split("; ")] if "h = " in text else [f"h = {text}"]
    after = replace(before, forms=(*before.forms, form), lines=(*before.lines, *lines))
    try:
        return (
            after
            if _rank(after) <= 4
            # The mean of nothing is nan.
            and all(g.isfinite().all() or after.selects for g in trained(after, eager))
            else None
        )
    # Most combinations of forms do not fit together.
    except Exception:
        return None


def _rank(made: Program) -> int:
    return max(replace(made, inside=False).net()(*batch).dim() for batch in made.batches())


# ------------------------------------------------------------ both sides


def eager(net: nn.Module) -> Any:
    return net


def on_ort(net: nn.Module) -> Any:
    from ortmodule import ORTModule, Settings

    return ORTModule(net, Settings())


def send_matmuls(made: Program) -> None:
    """Let torch or ONNX Runtime compute the matmuls of a program, whose layers are narrow."""
    from ortmodule._internal.torch_in_graph import torch_kernels

    # A generator of its own: the draw must not change which forms the program has.
    torch_kernels.LEAST_MATRIX_WIDTH = random.Random(made.seed).choice((1, 1, 64))


def trained(
    made: Program, engine: Callable[[nn.Module], Any], exact: bool = False
) -> list[torch.Tensor]:
    """Return the outputs and every gradient, for each batch."""
    net = made.net().train()
    for layer in net.children():
        if isinstance(layer, nn.BatchNorm1d) and ".eval()" in made.source():
            layer.eval()
    module = engine(net.double() if exact else net)
    found = []
    for batch in made.batches():
        wide = [_exactly(value, exact) for value in batch]
        # A third of the programs also compare the gradient of the input.
        wide[0] = wide[0].requires_grad_(bool(made.seed % 3 == 0))
        net.zero_grad()
        out = module(*wide)
        # Random weights of the outputs, so that errors do not cancel in the sum.
        torch.manual_seed(0)
        (out * torch.randn(out.shape, dtype=torch.float64).to(out.dtype)).sum().backward()
        of = [*net.parameters(), *wide[:1]]
        found += [
            out.detach(),
            *(torch.zeros_like(p.detach()) if p.grad is None else p.grad.clone() for p in of),
        ]
    if made.selects:
        module.eval()
        with torch.no_grad():
            found += [
                module(*(_exactly(value, exact) for value in batch)) for batch in made.batches()
            ]
    return found


def _exactly(value: torch.Tensor, exact: bool) -> torch.Tensor:
    return value.double() if exact and value.is_floating_point() else value


def verdict(made: Program) -> tuple[str, str]:
    """Return `same`, `differs` or `refused`, with a description."""
    theirs = trained(made, eager)
    try:
        exact = trained(made, eager, exact=True)
    except Exception:
        exact = theirs  # a program that names a dtype does not run in float64
    send_matmuls(made)
    try:
        ours = trained(made, on_ort)
    except Exception as error:
        return "refused", f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"
    names = ["out", *(name for name, _ in made.net().named_parameters()), "x"]
    for place, (mine, other, true) in enumerate(zip(ours, theirs, exact)):
        told = _difference(mine, other, true)
        if told:
            number, rest = divmod(place, len(names))
            where = names[rest] if number < 3 else f"evaluation {rest}"
            return "differs", f"batch {number}, {where}: {told}"
    return "same", ""


def _difference(mine: torch.Tensor, other: torch.Tensor, true: torch.Tensor) -> str:
    """Return where ort is neither close to float64 nor as close as eager; "" if nowhere."""
    if mine.shape != other.shape:
        return f"shape {tuple(mine.shape)}, eager {tuple(other.shape)}"
    if not mine.numel():
        return ""
    if not torch.equal(mine.isfinite(), other.isfinite()):
        return f"{mine.flatten()[:4].tolist()}, eager {other.flatten()[:4].tolist()}"
    mine, other, true = (value.double().nan_to_num(0.0, 0.0, 0.0) for value in (mine, other, true))
    far = min(float((mine - true).abs().max()), float((mine - other).abs().max()))
    # Up to 20 times eager's own rounding, or 1e-4 of the largest value.
    bound = 20 * float((other - true).abs().max()) + 1e-4 * max(float(true.abs().max()), 1e-2)
    worst = int((mine - other).abs().argmax())
    return (
        ""
        if far <= bound
        else f"{mine.flatten()[worst]:.6g}, eager {other.flatten()[worst]:.6g} (far {far:.2g})"
    )


def shortest(made: Program) -> Program:
    """Return the smallest program of its lines that still differs."""
    # Fewest lines first.
    for number in range(len(made.lines)):
        for kept in itertools.combinations(range(len(made.lines)), number):
            less = replace(made, lines=tuple(made.lines[i] for i in kept))
            try:
                if verdict(less)[0] == "differs":
                    return less
            except Exception:
                continue
    return made


# ------------------------------------------------------------ the run


def main() -> int:
    """Run programs until the time is over, each in a child process, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--only", type=int, nargs="*", help="seeds, also those with a result; nothing is kept"
    )
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ortlaunch-zoo"
    parser.add_argument("--cache", type=Path, default=default, help="where results are kept")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    store = options.cache / "fuzz.jsonl"
    found = {} if options.only else {one["seed"]: one for one in map(json.loads, _lines(store))}
    end = time.monotonic() + 60 * options.minutes
    seeds: Iterator[int] = iter(
        options.only or (seed for seed in itertools.count(options.first) if seed not in found)
    )
    _prepare()
    for seed in seeds:
        if time.monotonic() > end:
            break
        found[seed] = _child(seed)
        if not options.only:
            with store.open("a") as file:
                file.write(json.dumps(found[seed]) + "\n")
        if found[seed]["state"] not in ("same", "no case") or options.only:
            print(
                (
                    f"seed {seed}: {found[seed]['state']} "
                    f"{found[seed]['why']}\n{found[seed]['source']}"
                ),
                flush=True,
            )
    _table(list(found.values()))
    return int(any(one["state"] in ("differs", "ended") for one in found.values()))


def _lines(store: Path) -> list[str]:
    return store.read_text().splitlines() if store.is_file() else []


def _prepare() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from ortmodule._internal import import_ortmodule

    # Once for all children, in which an export would import it and collect its garbage: 7 s become 1.
    import_ortmodule.import_ortmodule_with_repairs_and_export_steps()
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


def _child(seed: int) -> dict[str, Any]:
    """Return the result of a program, even if it crashes its process."""
    made = program(seed)
    if made is None:
        return {"seed": seed, "state": "no case", "why": "", "forms": [], "source": ""}
    told: dict[str, Any] = {"seed": seed, "forms": made.forms, "source": made.source()}
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(SECONDS)  # ends a program that hangs, with SIGALRM as its status
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        state, why = verdict(made)
        less = shortest(made) if state == "differs" else made
        os.write(write, json.dumps({"state": state, "why": why, "source": _told(less)}).encode())
        os._exit(0)
    # Otherwise the read below would never end.
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    ended = {"state": "ended", "why": f"the process ended with {os.waitstatus_to_exitcode(status)}"}
    return {**told, **(json.loads(text) if text else ended)}


def _told(made: Program) -> str:
    sizes = "; ".join(f"x {list(b[0].shape)}, y {list(b[1].shape)}" for b in made.batches())
    return f"{made.source()}# {sizes}"


def _table(results: Sequence[dict[str, Any]]) -> None:
    """Print counts of results by the first form of the program, and their total."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for one in results:
        if one["forms"]:
            rows[one["forms"][0]][one["state"]] += 1
    print("| form | same | differs | refused | ended |\n|---|---|---|---|---|")
    for form, counts in sorted(rows.items()):
        # Only forms with a problem: hundreds of others are the same.
        if set(counts) != {"same"}:
            cells = (str(counts[state]) for state in ("same", "differs", "refused", "ended"))
            print(f"| `{form.replace('|', '/')}` | {' | '.join(cells)} |")
    print(
        f"{len(results)} programs, {len(rows)} forms: "
        f"{dict(Counter(one['state'] for one in results))}"
    )


if __name__ == "__main__":
    sys.exit(main())
