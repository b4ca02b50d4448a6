"""A server with torch loaded, which forks a fresh process for each piece of code.

The server must not load ONNX Runtime, nor a package that keeps references to parts of torch that
this package's repairs replace. A second server, a fork of the first, has both.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

Process = subprocess.CompletedProcess[str]
Run = Callable[..., Process]

# A server reads one JSON request a line. gc.freeze keeps the collector from copying shared pages
# in the children, and signal.alarm ends a child at its time limit. The second server imports ONNX
# Runtime as import_ortmodule.py does, and applies no repair that follows the import.
_SERVER = """
import gc, json, os, signal, sys
import torch, torch.onnx, torch._dynamo, torch.distributed.tensor, torch.utils.cpp_extension, onnx, pytest

def served(requests, answers):
    gc.freeze()
    second = None
    for line in requests:
        asked = json.loads(line)
        if asked.pop("ort"):
            second = second or with_ort()
            print(json.dumps({**asked, "ort": False}), file=second[1], flush=True)
            print(second[0].readline(), end="", file=answers, flush=True)
            continue
        pid = os.fork()
        if not pid:
            return asked
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)
    if second:
        second[1].close()
        os.wait()
    os._exit(0)

def with_ort():
    requests, write_requests = os.pipe()
    read_answers, answers = os.pipe()
    if os.fork():
        os.close(requests)
        os.close(answers)
        return os.fdopen(read_answers), os.fdopen(write_requests, "w")
    os.close(write_requests)
    os.close(read_answers)
    os.dup2(2, 1)
    from ortmodule._internal import import_ortmodule, pipeline
    import_ortmodule.import_ortmodule_with_repairs_before_it()
    import ortmodule_tests.modules
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    run(served(os.fdopen(requests), os.fdopen(answers, "w")))

def run(asked):
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
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        import traceback
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

for loaded in ("onnxruntime", "transformers", "deepspeed"):
    assert loaded not in sys.modules, loaded
print("ready", flush=True)
run(served(sys.stdin, sys.stdout))
"""


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Return `run(ort, code, *arguments, **environ)` of both servers."""
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

        def run(ort: bool, code: str, *arguments: str, timeout: int = 120, **more: str) -> Process:
            output = folder / str(next(numbers))
            asked = {"code": code, "arguments": arguments, "environ": {**os.environ, **more}, "timeout": timeout,
                     "folder": os.getcwd(), "output": str(output), "ort": ort}  # fmt: skip
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            status = int(server.stdout.readline())
            said = [Path(f"{output}.{number}").read_text(encoding="utf-8") for number in (1, 2)]
            return Process([*arguments], status, *said)

        yield run
        server.stdin.close()


@pytest.fixture(scope="session")
def fresh(servers: Run) -> Run:
    """Return `fresh(code, *arguments, **environ)`, which runs code in a forked process.

    The process has torch loaded and nothing of this package.
    """
    return partial(servers, False)


@pytest.fixture(scope="session")
def fresh_ort(servers: Run) -> Run:
    """Return a function like `fresh`, whose process has also imported ONNX Runtime.

    The repairs before that import are applied there, and no others.
    """
    return partial(servers, True)
