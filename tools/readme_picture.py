"""Draw README's picture: the terminal of a real `ortlaunch train bert-large/tiny`.

python tools/readme_picture.py [docs/train.svg]
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

COMMAND = ["ortlaunch", "train", "bert-large/tiny"]
KEPT = re.compile(r"^(run folder|engine|optimizer|step|ran on|trained|export|done)\b")
STEPS = ("step 10/", "step 50/", "step 100/", "step 150/", "step 200/")  # of twenty


def main(path: str = "docs/train.svg") -> None:
    """Train, and write the lines that a user reads as an SVG."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(sys.executable).with_name(COMMAND[0])
        done = subprocess.run(
            [program, *COMMAND[1:]], cwd=folder, capture_output=True, text=True, check=True
        )
    console = Console(record=True, width=96, file=io.StringIO(), highlight=False)
    console.print("$ " + " ".join(COMMAND), style="bold")
    for line in (done.stderr + done.stdout).splitlines():
        if KEPT.match(line) and (not line.startswith("step") or line.startswith(STEPS)):
            console.print(line, soft_wrap=False)
    # An id of its own for each picture would change the file at every run.
    picture = console.export_svg(title="ortlaunch", unique_id="train")
    # A reader's browser fetches nothing: the fonts that rich names lie on a public server.
    Path(path).write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.S))


if __name__ == "__main__":
    main(*sys.argv[1:])
