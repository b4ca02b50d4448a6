"""tools/torch-index: the index of torch builds that `make train` gives to pip."""

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
    """An index that answers becomes pip's option; one that does not is reported, and pip gets none."""
    (tmp_path / "torch").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
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
            env={"no_proxy": "*"},
        )
        if there:
            server.shutdown()
    assert ended.stdout == (f"--extra-index-url {url}\n" if there else "")
    assert ("cannot be reached" in ended.stderr) is not there
