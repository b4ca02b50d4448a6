"""The port that another's launcher names for its ranks to meet at: taken by somebody else, rank 0 says so at once.

torch would find out once its libraries are loaded, many seconds later on a busy host. Standard library and errors only.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ortlaunch.errors import LaunchError
from ortlaunch.rank import Rank, detect


def require_free(rank: Rank, environ: Mapping[str, str]) -> None:
    """Rank 0 of several hosts can listen where its launcher says.

    Raises:
        LaunchError: it cannot.
    """
    found = detect(environ)
    port = environ.get("MASTER_PORT", "")
    held = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun itself
    if rank.rank or rank.local_world_size == rank.world_size or held or not port.isdecimal():
        return
    if found is None or found[1] != "torchrun":
        return
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as torch does: the last run's port may rest
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            raise cannot_meet(
                environ, (getattr(error, "strerror", None) or str(error)).lower()
            ) from None


def cannot_meet(environ: Mapping[str, str], why: str) -> LaunchError:
    """What to say where ranks cannot meet as the launcher of the user's own has it."""
    where = ":".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return LaunchError(
        f"ranks cannot meet at {where} (MASTER_ADDR:MASTER_PORT of your launcher): {why}; if the port is in use, give "
        "another one, as torchrun --master-port"
    )
