"""Artifacts train in a browser as in Python, and four clients' weights return to the run."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from pydoc_data import topics
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from ortlaunch.resolve import shipped
from tests import labs
from tests.e2e.runs import COMMAND, ROOT, environment
from tests.ort import needs_ort

FOLDER = shipped.shipped_folder_or_refuse() / "examples/on-device"
WEB = ROOT / "build/onnxruntime-web/package/dist"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
pytestmark = [needs_ort, pytest.mark.slow, pytest.mark.ci, pytest.mark.timeout(500)]


def module(name: str) -> ModuleType:
    """Import a file of the example."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def last_losses(folder: Path, count: int) -> float:
    """Return the mean of the last losses of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    losses = [record["loss"] for line in lines if "loss" in (record := json.loads(line))]
    return float(np.mean(losses[-count:]))


def in_a_page(artifacts: Path, text: Path, received: Path) -> tuple[list[float], list[bytes]]:
    """Open the page, and return the losses that it found and all that it sent."""
    sent: dict[str, bytes] = {}
    made = module("serve").server(artifacts, WEB, received, 0)
    handler: Any = made.RequestHandlerClass
    handler.folders["texts"] = text.parent
    own = handler.do_POST

    def post(self: Any) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        sent[self.path] = self.path.encode() + str(self.headers).encode() + body
        if self.path == "/losses":
            self.send_response(204)
            self.end_headers()
            return
        self.rfile = io.BytesIO(body)
        own(self)

    handler.do_POST = post
    threading.Thread(target=made.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{made.server_port}/?client=browser&text=/texts/{text.name}"
    profile = received / "profile"
    browser = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", address],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        end = time.monotonic() + 90
        while "/losses" not in sent and time.monotonic() < end:
            time.sleep(0.1)
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        made.shutdown()
        made.server_close()
    assert "/losses" in sent, f"the page sent {[*sent]} in 90 seconds"
    body = sent["/losses"]
    losses: list[float] = json.loads(body[body.index(b"[", body.rindex(b"\n")) :])
    return losses, [*sent.values()]


def test_four_clients_train_and_return(home: Path, tmp_path: Path) -> None:
    """A page trains as Python does, sends weights alone, and the run continues from the average."""
    if not (CHROMIUM and WEB.is_dir()):
        why = "needs Chromium (.ci/run installs it) and onnxruntime-web (make test-ci fetches it)"
        labs.skip(why)
    env = environment(home)

    def ortlaunch(*arguments: object) -> str:
        ended = subprocess.run(
            [COMMAND, *map(str, arguments)], cwd=tmp_path, env=env, check=False,
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    recipe = FOLDER / "bytes.yaml"
    ortlaunch("train", recipe, "train.max_steps=40", "log.every_steps=1", "--run-dir=run")
    ortlaunch("export", "run", "--format", "ondevice", "--to", "artifacts")
    texts = [*topics.topics.values()]
    received = tmp_path / "received"
    received.mkdir()
    for at, name in enumerate(("browser", "second", "third", "fourth")):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts[at::4])[:12_000])
    text = tmp_path / "browser.txt"
    losses, sent = in_a_page(tmp_path / "artifacts", text, received)
    # The same training in Python, in a process of its own: onnxruntime keeps state.
    for name in ("browser", "second", "third", "fourth"):
        target = tmp_path / "reference.f32" if name == "browser" else received / f"{name}.f32"
        code = (
            "import sys, json; sys.path.insert(0, sys.argv[1]); import client; "
            "losses, weights = client.train(sys.argv[2], open(sys.argv[3]).read()); "
            "weights.astype('<f4').tofile(sys.argv[4]); print(json.dumps(losses))"
        )
        arguments = [str(FOLDER), str(tmp_path / "artifacts"), f"{name}.txt", str(target)]
        printed = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path, check=True, capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip
        target.with_suffix(".samples").write_text("80")
        if name == "browser":
            assert len(losses) == 20
            assert np.abs(np.array(json.loads(printed.splitlines()[-1])) - losses).max() < 1e-5
            weights = [np.fromfile(path, "<f4") for path in (target, received / "browser.f32")]
            assert np.abs(weights[0] - weights[1]).max() < 1e-5
    words = set(re.findall(rb"[A-Za-z]{6,}", text.read_bytes()))
    # Letters of the addresses and headers are not the user's text.
    usual = b"browser weights samples client localhost content headless chrome mozilla".split()
    assert not [
        word for word in words if word.lower() not in usual and any(word in body for body in sent)
    ]
    clients = sorted(received.glob("*.f32"))
    assert len(clients) == 4
    assert ortlaunch("device", "average", "artifacts", *clients).count("25.00%") == 4
    ortlaunch("device", "import", "artifacts", "run", "--to", "back")
    more = ("train.max_steps=60", "log.every_steps=1", "engine.name=ort")
    ortlaunch("train", recipe, *more, "--resume", "back", "--run-dir=continued")
    engine = json.loads((tmp_path / "continued/engine.json").read_text())
    assert engine["engine"]["used"] == "ort"
    assert last_losses(tmp_path / "continued", 5) < last_losses(tmp_path / "run", 5)
