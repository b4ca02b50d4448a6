"""A server with torch loaded, which forks a fresh process for each piece of code.

The server must not load ONNX Runtime, nor a package that keeps references to parts of torch that
ortlaunch's repairs replace.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Process = subprocess.CompletedProcess[str]
Run = Callable[..., Process]

# The server reads one JSON request a line. gc.freeze keeps the collector from copying shared pages
# in the children, and signal.alarm ends a child at its time limit.
_SERVER = """
import gc, json, os, signal, sys
import torch, torch.onnx, torch._dynamo, torch.distributed.tensor, torch.utils.cpp_extension, onnx, pydantic, pytest
import ortlaunch.recipe
for loaded in ("onnxruntime", "transformers", "deepspeed"):
    assert loaded not in sys.modules, loaded
gc.freeze()
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(asked["timeout"])
for number in (1, 2):
    os.dup2(os.open(f"{asked['output']}.{number}", os.O_WRONLY | os.O_CREAT, 0o600), number)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.environ.clear()
os.environ.update(asked["environ"])
os.chdir(asked["folder"])
sys.path[0] = ""
sys.argv = ["-c", *asked["arguments"]]
status = 0
try:
    exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})
except SystemExit as end:
    status = end.code if isinstance(end.code, int) else 0 if end.code is None else print(end.code, file=sys.stderr) or 1
except BaseException:
    import traceback
    traceback.print_exc()
    status = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
"""


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return `fresh(code, *arguments, **environ)`, which runs code in a forked process.

    The process has torch loaded and nothing of ortlaunch but its recipes.
    """
    folder = tmp_path_factory.mktemp("forks")
    numbers = itertools.count()
    # One thread: a process with a pool of OpenMP threads cannot be forked safely.
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        # The imports of the server take seconds.
        assert server.stdout.readline() == "ready\n"

        def run(code: str, *arguments: str, timeout: int = 120, **more: str) -> Process:
            output = folder / str(next(numbers))
            asked = {"code": code, "arguments": arguments, "environ": {**os.environ, **more}, "timeout": timeout,
                     "folder": os.getcwd(), "output": str(output)}  # fmt: skip
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            said = [Path(f"{output}.{number}").read_text(encoding="utf-8") for number in (1, 2)]
            return Process([*arguments], status, *said)

        yield run
        server.stdin.close()
