"""A check that the rendezvous port of the user's own launcher is free, before torch is loaded.

torch would detect it only after its libraries are loaded, many seconds later on a busy host. This
module imports only the standard library and errors.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from ortlaunch.base.errors import LaunchError
from ortlaunch.rank import Rank, rank_and_launcher_name_or_none


def require_free_rendezvous_port_on_rank_0(rank: Rank, environ: Mapping[str, str]) -> None:
    """Check that rank 0 of several hosts can listen on the port of its launcher.

    Raises:
        LaunchError: it cannot.
    """
    detected_launcher = rank_and_launcher_name_or_none(environ)
    port = environ.get("MASTER_PORT", "")
    # torchrun's agent itself listens on the port.
    is_held_by_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if (
        rank.rank
        or rank.local_world_size == rank.world_size
        or is_held_by_agent
        or not port.isdecimal()
        or detected_launcher is None
        or detected_launcher[1] != "torchrun"
    ):
        return
    with socket.socket() as probe:
        # As torch does: the port of the last run may be in TIME_WAIT.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            raise ranks_cannot_connect_error(
                environ, (getattr(error, "strerror", None) or str(error)).lower()
            ) from None


def ranks_cannot_connect_error(environ: Mapping[str, str], reason: str) -> LaunchError:
    """Return the error of ranks that cannot meet at the address of the user's own launcher."""
    endpoint = ":".join(environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return LaunchError(
        f"ranks cannot connect at {endpoint} (MASTER_ADDR:MASTER_PORT of your launcher): {reason}; if "
        "the port is in use, give another one, as torchrun --master-port"
    )
