"""Draw the pictures of docs/pictures: boxes, arrows and words, as SVG for a light and a dark screen.

python tools/pictures.py [FOLDER]
    writes life-of-a-run.svg, export.svg, ends.svg, checkpoint.svg and mesh.svg; a test holds the files to this
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
# The site's dark mode may differ from the visitor's system, which an image follows: it has its own ground.
STYLE = """
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.small { font-size: 11.5px; fill: #59636e }
.code { font-family: ui-monospace, monospace; font-size: 12px }
.ground { fill: #ffffff }
.box { fill: #f6f8fa; stroke: #8c959f }
.good { fill: #dafbe1; stroke: #1a7f37 }
.bad { fill: #ffebe9; stroke: #cf222e }
.other { fill: #fff8c5; stroke: #9a6700 }
.blue { fill: #ddf4ff; stroke: #0969da }
.line { stroke: #59636e; fill: none; stroke-width: 1.4 }
.head { fill: #59636e }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.small { fill: #9198a1 }
.ground { fill: #0d1117 }
.box { fill: #151b23; stroke: #656c76 }
.good { fill: #12261e; stroke: #3fb950 }
.bad { fill: #2d1417; stroke: #f85149 }
.other { fill: #272115; stroke: #d29922 }
.blue { fill: #121d2f; stroke: #4493f8 }
.line { stroke: #9198a1 }
.head { fill: #9198a1 }
}"""


def _text(x: float, y: float, words: str, kind: str = "small", anchor: str = "middle") -> str:
    """Return a line of text as SVG."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(words)}</text>'


class Box(NamedTuple):
    """A box with a title and small lines under it; all lengths in pixels."""

    left: float
    top: float
    width: float
    height: float
    title: str
    lines: Sequence[str] = ()
    kind: str = "box"

    def svg(self) -> str:
        """Return the box as SVG."""
        middle = self.left + self.width / 2
        first = self.top + self.height / 2 - 8 * len(self.lines) + 5
        texts = [_text(middle, first, self.title, "title")]
        texts += [
            _text(middle, first + 16 * number, line) for number, line in enumerate(self.lines, 1)
        ]
        return (
            f'<rect class="{self.kind}" x="{self.left:g}" y="{self.top:g}" width="{self.width:g}" '
            f'height="{self.height:g}" rx="6"/>\n' + "\n".join(texts)
        )


class Arrow(NamedTuple):
    """An arrow along points, with small words beside the middle of its first part."""

    points: Sequence[tuple[float, float]]
    words: str = ""
    side: str = "middle"
    """Where the words are anchored: `start` puts them on the right of the arrow."""
    has_head: bool = True

    def svg(self) -> str:
        """Return the arrow as SVG."""
        path = " L".join(f"{x:g} {y:g}" for x, y in self.points)
        head = ' marker-end="url(#head)"' if self.has_head else ""
        lines = [f'<path class="line" d="M{path}"{head}/>']
        if self.words:
            (x0, y0), (x1, y1) = self.points[:2]
            shift = {"middle": (0, -6), "start": (7, 4), "end": (-7, 4)}[self.side]
            x, y = (x0 + x1) / 2 + shift[0], (y0 + y1) / 2 + shift[1]
            lines.append(_text(x, y, self.words, anchor=self.side))
        return "\n".join(lines)


class Words(NamedTuple):
    """A line of text."""

    left: float
    top: float
    text: str
    kind: str = "small"

    def svg(self) -> str:
        """Return the text as SVG."""
        return _text(self.left, self.top, self.text, self.kind, "start")


def drawing(title: str, width: int, height: int, parts: Sequence[Box | Arrow | Words]) -> str:
    """Return an SVG of parts; the title is read by a screen reader."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}\n</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">',
        '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
        *(part.svg() for part in parts),
        "</svg>\n",
    ])  # fmt: skip


# ------------------------------------------------------------ the pictures


def life_of_a_run() -> str:
    """Draw the command, the run folder, the ranks and the verdict."""
    rank_lines = (
        "its own supervisor watches it",
        "data, model, export",
        "step 1 beside PyTorch",
        "training, saves",
    )
    return drawing("The life of a run", 860, 400, [
        Box(20, 40, 180, 92, "ortlaunch train", ("reads the recipe,", "checks it, plans:", "ranks, batch, memory")),
        Arrow([(110, 132), (110, 172)], "a mistake", "start"),
        Box(20, 172, 180, 58, "every error at once", ("status 2; nothing was started",), "bad"),
        Arrow([(200, 86), (258, 86)]),
        Box(258, 40, 170, 92, "launcher", ("one process, torchrun,", "mpirun, or the scheduler", "around the command")),
        Arrow([(428, 86), (476, 86)]),
        Box(484, 48, 184, 104, "", ()),
        Box(480, 44, 184, 104, "", ()),
        Box(476, 40, 184, 104, "rank 0, 1, 2, ...", rank_lines, "blue"),
        Arrow([(668, 92), (700, 92)]),
        Box(700, 40, 140, 104, "verdict", ("why it ended,", "which rank and host,", "what to try")),
        Arrow([(343, 132), (343, 262)], "request, plan", "start"),
        Arrow([(570, 152), (570, 262)], "logs, metrics, checkpoints", "start"),
        Arrow([(770, 144), (770, 262)], "job.json", "start"),
        Box(258, 262, 582, 112, "run folder", (
            "recipe.yaml   plan.json   environment.json   what was requested",
            "logs/   errors/   metrics.jsonl   engine.json   what ran, on which engine",
            "checkpoints/   to continue from, in any world",
            "summary.json   export/   the result, in transformers' format",
        )),
        Words(20, 300, "status  logs  report", "code"),
        Words(20, 318, "diagnose  evaluate", "code"),
        Words(20, 338, "other commands read it,"),
        Words(20, 354, "also on another host"),
        Arrow([(258, 312), (176, 312)]),
    ])  # fmt: skip


def export() -> str:
    """Draw one export of ORTModule, with the phases of its repairs."""
    phases = [
        ("plain pass", ("two rows of the first", "batch, in PyTorch"), "context"),
        ("trace", ("TorchScript records", "the operators"), "trace wrapper, operator form"),
        ("graph", ("ONNX; masks, loss and", "attention are rewritten"), "graph pass"),
        ("gradients", ("ONNX Runtime derives", "the backward graph"), "gradient selection"),
        ("comparison", ("loss and gradients of", "step 1 beside PyTorch"), "verdict"),
    ]
    parts: list[Box | Arrow | Words] = [
        Words(20, 34, "import ortmodule", "code"),
        Words(
            150,
            34,
            "phases before import, after import and install; "
            "python -m ortmodule.export prints all repairs in their order",
        ),
    ]
    for number, (title, lines, phase) in enumerate(phases):
        left = 16 + number * 168
        parts.append(Box(left, 60, 156, 84, title, lines, "blue"))
        if number:
            parts.append(Arrow([(left - 12, 102), (left, 102)]))
        parts.append(Arrow([(left + 40, 172), (left + 40, 144)]))
        parts += [
            Words(left + 22, 188 + 15 * row, text, "code")
            for row, text in enumerate(phase.split(", "))
        ]
    parts += [
        Box(16, 254, 264, 74, "cannot be exported",
            ("the operator runs as torch inside the graph,", "or the run ends, with a remedy"), "other"),
        Box(296, 254, 270, 74, "another call", ("another signature or mode:", "exported again, and recorded"), "other"),
        Box(582, 254, 262, 74, "agrees", ("every pass runs in ONNX Runtime;", "engine.json counts the passes"), "good"),
        Arrow([(820, 144), (820, 254)]),
        Arrow([(196, 144), (196, 254)]),
    ]  # fmt: skip
    return drawing("One export, with the phases of its repairs", 860, 350, parts)


def ends() -> str:
    """Draw how a run can end, with the exit status of each end."""
    return drawing("How a run can end", 860, 372, [
        Box(20, 40, 150, 70, "checked", ("recipe, files, hosts",)),
        Arrow([(95, 110), (95, 286)], "a mistake of the input", "start"),
        Box(20, 286, 150, 62, "2", ("nothing was started",), "bad"),
        Arrow([(170, 75), (250, 75)], "ranks start"),
        Box(250, 40, 180, 70, "runs", ("steps, evaluations, saves",), "blue"),
        Arrow([(430, 75), (690, 75)], "all steps done, or stopped early"),
        Box(690, 40, 150, 70, "0", ("export/ has the model",), "good"),
        Arrow([(400, 110), (400, 170), (690, 170)]),
        Words(410, 163, "SIGTERM or ortlaunch stop: saves, ends"),
        Box(690, 136, 150, 70, "85", ("saved: run it again",), "other"),
        Arrow([(350, 110), (350, 240), (690, 240)]),
        Words(360, 233, "Ctrl-C: the same; a second one ends all at once"),
        Box(690, 216, 150, 62, "130", ("saved where possible",), "other"),
        Arrow([(290, 110), (290, 318), (690, 318)]),
        Words(300, 311, "a rank fails, is lost or stalls; every other rank is ended"),
        Words(300, 338, "its own status, 124 (stalled), 128 + signal: job.json has the cause"),
        Box(690, 288, 150, 62, "1", ("or the first failure's own",), "bad"),
        Arrow([(765, 136), (765, 124), (470, 124), (470, 98), (430, 98)]),
        Words(488, 118, "the same command continues"),
    ])  # fmt: skip


def checkpoint() -> str:
    """Draw values that four ranks saved and that two ranks, or one, read."""
    parts: list[Box | Arrow | Words] = [
        Words(20, 40, "saved by 4 ranks, ZeRO 2", "title"),
        Words(20, 58, "each rank writes the ranges that it holds"),
        Words(20, 150, "checkpoints/step_00000400", "code"),
        Words(20, 168, "index.json: the ranges of each file"),
        Words(20, 184, "manifest.json: sizes and check sums"),
        Words(20, 268, "read by 2 ranks, ZeRO 3", "title"),
        Words(20, 286, "each rank reads the ranges that it needs"),
        Words(20, 366, "read by 1 rank, without sharding", "title"),
        Words(20, 384, "also on another engine"),
    ]
    left, width = 262, 580
    for rank in range(4):
        x = left + rank * width / 4
        parts.append(Box(x, 26, width / 4 - 6, 48, f"rank {rank}", (), "blue"))
        parts.append(Arrow([(x + 68, 74), (x + 68, 134)]))
        name = f"weight:w@{rank * 250}"
        parts.append(Box(x, 134, width / 4 - 6, 58, name, (f"rank_{rank:05}.safetensors",)))
        # Both readers take from all files.
        parts.append(Arrow([(x + 68, 192), (x + 68, 252)]))
    for rank in range(2):
        x = left + rank * width / 2
        parts.append(
            Box(
                x,
                252,
                width / 2 - 6,
                48,
                f"rank {rank}: w[{rank * 500}:{rank * 500 + 500}]",
                (),
                "good",
            )
        )
    parts.append(Words(left + width / 2 - 10, 330, "or"))
    parts.append(Box(left, 350, width - 6, 48, "rank 0: w[0:1000]", (), "good"))
    return drawing("A checkpoint that another world reads", 860, 420, parts)


def mesh() -> str:
    """Draw the mesh of eight ranks on two hosts: copies, their parts, and slices of layers."""
    parts: list[Box | Arrow | Words] = [
        Words(20, 32, "parallel: {replicate: 2, shard: 2, tensor: 2}", "code"),
        Arrow([(380, 182), (480, 182)], "gradients", has_head=False),
        Words(20, 338, "replicate: each host has a copy of the model"),
        Words(20, 354, "shard: each rank of a column has a part of the rows of every weight, gathered layer by layer"),
        Words(20, 372, "tensor: the ranks of a row compute each layer together, on the same samples"),
    ]  # fmt: skip
    for host in range(2):
        left = 20 + 460 * host
        parts.append(Box(left, 46, 360, 270, ""))
        parts.append(Words(left + 14, 68, f"host {host}", "title"))
        for row in range(2):
            top = 84 + 134 * row
            group = 2 * host + row
            parts.append(
                Arrow(
                    [(left + 134, top + 42), (left + 226, top + 42)], "activations", has_head=False
                )
            )
            for column in range(2):
                x = left + 14 + 212 * column
                lines = (f"part {row}, slice {column}", f"samples {group}")
                kind = "blue" if row == 0 else "good"
                parts.append(Box(x, top, 120, 84, f"rank {2 * group + column}", lines, kind))
                if row == 0:
                    ends = [(x + 60, top + 84), (x + 60, top + 134)]
                    words = "" if column else "weights, gradients"
                    parts.append(Arrow(ends, words, "start", has_head=False))
    return drawing("The mesh of eight ranks on two hosts", 860, 388, parts)


PICTURES: dict[str, Callable[[], str]] = {
    "life-of-a-run.svg": life_of_a_run,
    "export.svg": export,
    "ends.svg": ends,
    "checkpoint.svg": checkpoint,
    "mesh.svg": mesh,
}


def main(folder: Path = FOLDER) -> None:
    """Write all pictures."""
    folder.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        (folder / name).write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
