"""Commands on other hosts: the options of every ssh that ortlaunch starts, and which hosts need none."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ortlaunch.plan import is_this_host

_MISSED_ANSWERS = 3


def needs_no_ssh(host: str) -> bool:
    """Whether a command for this host, as a host file names it, is started here: by its own name, and as no user."""
    return "@" not in host and is_this_host(host)


def ssh(
    host: str, command: Iterable[str], connect_seconds: int, alive_seconds: int | None = None
) -> list[str]:
    """The ssh that runs a command on a host, without a terminal and without questions.

    Args:
        connect_seconds: after which a host that does not answer fails.
        alive_seconds: between two checks of the connection, which ends when the third in a row fails; None: no checks.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={connect_seconds}"]
    if alive_seconds is not None:
        options += [
            f"ServerAliveInterval={alive_seconds}",
            f"ServerAliveCountMax={_MISSED_ANSWERS}",
        ]
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *flags, host, shlex.join(command)]
