"""The rendezvous port of the user's own launcher, which rank 0 checks before it loads libraries."""

from __future__ import annotations

import socket

import pytest

from ortlaunch.base.errors import LaunchError
from ortlaunch.rank import Rank
from ortlaunch.worker.process_group.rendezvous_port import require_free_rendezvous_port_on_rank_0

FIRST = Rank(0, 4, 0, 2)
RANKS = dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), map(str, FIRST)))


def test_a_port_that_is_taken() -> None:
    """Only rank 0 of several hosts fails if the port is in use, and not with torchrun's store."""
    # Another program listens on the port.
    with socket.create_server(("", 0)) as squatter:
        environ = {**RANKS, "MASTER_ADDR": "first", "MASTER_PORT": str(squatter.getsockname()[1])}
        with pytest.raises(
            LaunchError,
            match=r"^ranks cannot connect at first:\d+ .*: address already in use; if the po",
        ):
            require_free_rendezvous_port_on_rank_0(FIRST, environ)
        require_free_rendezvous_port_on_rank_0(Rank(1, 4, 1, 2), environ)
        require_free_rendezvous_port_on_rank_0(Rank(0, 2, 0, 2), environ)
        require_free_rendezvous_port_on_rank_0(
            FIRST, {**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        )
    require_free_rendezvous_port_on_rank_0(FIRST, environ)
