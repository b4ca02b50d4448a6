"""Test tools/torch-index, the index of torch builds that `make train` passes to pip."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools/torch-index"


@pytest.mark.parametrize("there", [True, False])
def test_the_index_of_torch_builds(there: bool, tmp_path: Path) -> None:
    """A reachable index is printed as pip's option; an unreachable one is reported on stderr."""
    (tmp_path / "torch").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    # Port 0: the kernel chooses a free port. A closed server refuses connections there.
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        if there:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        ended = subprocess.run(
            [sys.executable, TOOL, url],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            # The variables of a proxy are left out: it may not reach this machine's own address.
            env={"no_proxy": "*"},
        )
        if there:
            server.shutdown()
    assert ended.stdout == (f"--extra-index-url {url}\n" if there else "")
    assert ("cannot be reached" in ended.stderr) is not there
