"""Commands on other hosts: the options of every ssh that ortlaunch starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from ortlaunch.launch_plan import is_this_host

# ssh's own default of ServerAliveCountMax.
_MISSED_ANSWERS = 3


def needs_no_ssh(host: str) -> bool:
    """Whether a command for this host name is started here: the host is this one, without a user."""
    return "@" not in host and is_this_host(host)


def ssh_argv(
    host_name: str,
    command_words: Iterable[str],
    connect_seconds: int,
    keep_alive_seconds: int | None = None,
) -> list[str]:
    """Return the ssh command that runs `command_words` on a host, without a terminal and without prompts.

    Args:
        connect_seconds: time after which an attempt to connect fails.
        keep_alive_seconds: time between two checks of the connection, which ends when three in a row
            fail; None: no checks.
    """
    options = ["BatchMode=yes", f"ConnectTimeout={connect_seconds}"]
    if keep_alive_seconds is not None:
        options += [
            f"ServerAliveInterval={keep_alive_seconds}",
            f"ServerAliveCountMax={_MISSED_ANSWERS}",
        ]
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", "-T", *flags, host_name, shlex.join(command_words)]
