"""Host files and ``--include``/``--exclude`` filters, parsed into one tuple of Host.

Accepted is the superset of the formats that DeepSpeed, Open MPI, MPICH and Intel MPI read; refused
is any line that one of them would have to guess about. The order in the file is the rank order.
Pure except for ``read_hostfile``, which reads one file. Imports nothing of ortlaunch but errors.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from select import select as wait_for
from typing import NamedTuple

from ortlaunch.errors import IS_LFS_POINTER, LFS_POINTER, HostfileError
from ortlaunch.launch_plan import LOCAL_NAMES, is_this_host

_EXAMPLE = "'worker-1 slots=8'"
_KEYS = ("slots", "max_slots")
# Limits against wrong files: digits of a number, names in an error, and bytes of a file.
_MOST_DIGITS = 4
_MOST_LISTED = 16
_MOST_BYTES = 10_000_000
# Time for the writer of a pipe, as in `--hostfile <(scontrol show hostnames)`.
_PIPE_SECONDS = 10

# Groups: `user@`, an IPv6 address in brackets, another name or address, and `:slots`.
_NAME = re.compile(
    r"((?:[a-z0-9_][\w.-]*@)?)(?:\[([0-9a-f]*:[0-9a-f:.]+(?:%[\w.-]+)?)\]|([a-z0-9_][\w.-]*))(:[^:]*)?",
    re.ASCII | re.IGNORECASE,
)
# Groups: key, equals sign with spaces, value; or a text that is no setting.
_SETTING = re.compile(r"([^\s=]+)(\s*=\s*)(\S*)|(\S+)")


class Host(NamedTuple):
    """One machine and the devices that ranks may use.

    ``name`` is in the form for ssh (``user@`` kept, no brackets).
    """

    name: str
    slots: int
    devices: tuple[int, ...]
    max_slots: int | None = None

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return is_this_host(self.name)


class HostList(NamedTuple):
    """Hosts in rank order, and the dialect of their file."""

    hosts: tuple[Host, ...]
    dialect: str


class _Setting(NamedTuple):
    column: int
    label: str
    value: str
    spaced: bool = False


_Problems = list[tuple[int, str]]  # column and text


def read_hostfile(path: str | os.PathLike[str], default_slots: int | None = None) -> HostList:
    """Read a host file from disk.

    Raises:
        HostfileError: it cannot be read, is not UTF-8 or names no host.
    """
    return parse_hostfile(hostfile_text(path), os.fspath(path), default_slots)


def hostfile_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a host file.

    Raises:
        HostfileError: it cannot be read or is not UTF-8.
    """
    source = os.fspath(path)
    try:
        data = _bytes(source)
    except OSError as error:
        raise HostfileError(
            f"{source}: cannot be read: {error.strerror}; give a file with lines such as {_EXAMPLE}"
        ) from error
    return _decode(data, source)


def _bytes(source: str) -> bytes:
    """Return the content of a file or pipe, such as `<(scontrol show hostnames)`.

    Raises:
        OSError: the pipe does not end in time, or the file is too large.
    """
    data = b""
    deadline = time.monotonic() + _PIPE_SECONDS
    # O_NONBLOCK, because opening a pipe without a writer would wait for ever.
    handle = os.open(source, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb", buffering=0) as file:
        while len(data) <= _MOST_BYTES:
            if not wait_for([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(errno.ETIMEDOUT, f"this pipe had no data for {_PIPE_SECONDS} s")
            piece = os.read(handle, 1 << 16)
            if not piece:
                return data
            data += piece
    raise OSError(errno.EFBIG, f"it has more than {_MOST_BYTES:,} bytes")


def parse_hostfile(text: str, source: str, default_slots: int | None = None) -> HostList:
    """Parse the text of a host file; ``source`` names it in errors.

    A line without slots is an error unless ``default_slots`` gives their number. All problems are
    in one HostfileError, a line each: ``SOURCE:LINE:COLUMN: problem; remedy``.
    """
    hosts, marks = _collect(_lines(text), source, default_slots)
    if not hosts:
        raise HostfileError(
            f"{source}: it lists no host; write one line per host, such as {_EXAMPLE}"
        )
    return HostList(hosts, _dialect(marks))


def select(
    hosts: Sequence[Host], include: str | None = None, exclude: str | None = None
) -> tuple[Host, ...]:
    """Keep or drop hosts and slots by DeepSpeed's grammar, ``worker-2:0,1@worker-3``.

    The order stays. A host is named without its ``user@``, because ``@`` separates hosts here; IPv6
    goes in brackets.
    """
    if include is not None and exclude is not None:
        raise HostfileError("--include and --exclude exclude each other; keep one of them")
    text, option = (include, "--include") if exclude is None else (exclude, "--exclude")
    if text is None:
        return tuple(hosts)
    named = _filter(text, option, {_machine(host.name): host for host in hosts})
    picked = (
        _pick(host, named.get(_machine(host.name), ()), drop=exclude is not None) for host in hosts
    )
    kept = tuple(host for host in picked if host.slots)
    if not kept:
        raise HostfileError(f"{option} {text!r} leaves no slot on any host; leave at least one")
    return kept


def _decode(data: bytes, source: str) -> str:
    """Return the data as text; raise HostfileError at the first byte that is not UTF-8."""
    if data.startswith(LFS_POINTER):
        raise HostfileError(f"{source} {IS_LFS_POINTER}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise HostfileError(
            f"{source}:{line}:{column}: byte 0x{data[error.start]:02x} is not UTF-8; save the "
            "file as UTF-8"
        ) from error


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines with more than a comment."""
    # splitlines() would also split at form feeds.
    for number, line in enumerate(re.split(r"\r\n?|\n", text.lstrip("\ufeff")), 1):
        content = line.partition("#")[0]
        if content and not content.isspace():
            yield number, content


def _collect(
    lines: Iterable[tuple[int, str]], source: str, default_slots: int | None
) -> tuple[tuple[Host, ...], set[str]]:
    """Return hosts and dialect marks of numbered lines, or raise one error with every problem."""
    hosts: list[Host] = []
    marks: set[str] = set()
    complaints: list[str] = []
    seen: dict[str, str] = {}
    for number, content in lines:
        problems: _Problems = []
        if host := _read(content, default_slots, marks, problems):
            hosts.append(host)
            _refuse_repeated(host, f"{source}:{number}:{_column(content)}", seen, complaints)
        complaints += [f"{source}:{number}:{column}: {text}" for column, text in problems]
    if len(hosts) - len(seen) > 1:
        mend = f"sort {source} | uniq -c | awk '{{print $2\" slots=\"$1}}'"
        complaints.append(f"{source}: of a list with a name for each slot (PBS, LSF): {mend}")
    if complaints:
        raise HostfileError("\n".join(complaints))
    return tuple(hosts), marks


def _refuse_repeated(host: Host, place: str, seen: dict[str, str], complaints: list[str]) -> None:
    # Compared without user and letter case: two names of one machine would put two ranks on one
    # device.
    name = _machine(host.name).lower()
    first = seen.setdefault(name, place)
    if first != place:
        mend = (
            "Open MPI would add up the slots and DeepSpeed would refuse; write it once with "
            "all its slots"
        )
        complaints.append(f"{place}: host {name!r} is already at {first}; {mend}")


def _read(
    content: str, default_slots: int | None, marks: set[str], problems: _Problems
) -> Host | None:
    """Return the host on one line, and add the mark of its dialect; None when ``problems`` grew."""
    column = _column(content)
    token = content.split(None, 1)[0]
    name, colon = _split(token, column, problems)
    settings = {} if colon is None else {"slots": _Setting(column, token, colon)}
    _read_settings(content, column - 1 + len(token), settings, problems)
    if not problems and default_slots is None and "slots" not in settings:
        problems.append((column, _no_slots(token)))
    numbers = {key: _number(setting, problems) for key, setting in settings.items()}
    slots = numbers.get("slots", default_slots or 0)
    most = numbers.get("max_slots")
    if not problems and most is not None and most < slots:
        low = f"max_slots={most} is below slots={slots}; make it {slots} or more, or leave it out"
        problems.append((settings["max_slots"].column, low))
    if problems:
        return None
    marks.add(_mark(settings, colon))
    return Host(name, slots, tuple(range(slots)), most)


def _split(token: str, column: int, problems: _Problems) -> tuple[str, str | None]:
    """Return name and slots of ``user@[::1]:4``: ``user@::1`` and ``4``, or None without a colon."""
    match = _NAME.fullmatch(token)
    if match is None:
        problems.append((column, _bad_name(token)))
        return "", None
    user, ipv6, plain, colon = match.groups()
    if ipv6 and ipv6 not in LOCAL_NAMES:
        problems.append((column, _no_ipv6(token)))
    return user + (ipv6 or plain), colon and colon[1:]


def _read_settings(
    content: str, start: int, settings: dict[str, _Setting], problems: _Problems
) -> None:
    """Add the ``key=value`` pairs behind the host name to ``settings``; max-slots is max_slots."""
    for match in _SETTING.finditer(content, start):
        key, equals, value, junk = match.groups()
        column = match.start() + 1
        label = match[0].rstrip()
        known = (key or "").replace("-", "_")
        if junk:
            problems.append(
                (column, f"{label!r} is not understood; write key=value, such as slots=8")
            )
        elif known not in _KEYS:
            problems.append((column, _unknown_key(key, label)))
        elif known in settings:
            problems.append(
                (column, f"{label!r} comes after {settings[known].label!r}; write {known} once")
            )
        else:
            settings[known] = _Setting(column, label, value, equals != "=")


def _number(setting: _Setting, problems: _Problems) -> int:
    """Return the number in a setting, or 0 and a new problem."""
    column, label, value, _ = setting
    digits = value[1:] if value.startswith("-") else value
    if not (digits.isascii() and digits.isdigit()):
        problems.append(
            (column, f"{label!r} does not end in a whole number; write for example slots=8")
        )
    elif digits != value or not value.strip("0"):
        problems.append((column, f"{label!r} is below 1; write 1 or more, or delete the line"))
    elif len(value) > _MOST_DIGITS:
        problems.append(
            (column, f"{label!r} has over {_MOST_DIGITS} digits; write the number of devices")
        )
    else:
        return int(value)
    return 0


def _mark(settings: dict[str, _Setting], colon: str | None) -> str:
    """Return the dialect that a line belongs to; empty for a bare name."""
    if colon is not None:
        return "MPICH / Intel MPI"
    if "max_slots" in settings or any(setting.spaced for setting in settings.values()):
        return "Open MPI"
    return "DeepSpeed / Open MPI" if settings else ""


def _dialect(marks: set[str]) -> str:
    """Return the dialect that fits all lines.

    One line that only Open MPI reads makes it an Open MPI file.
    """
    named = marks - {"", "DeepSpeed / Open MPI"} if "Open MPI" in marks else marks - {""}
    return " and ".join(sorted(named)) or "names only"


def _bad_name(token: str) -> str:
    if "=" in token:
        return f"a host name is missing before {token!r}; write for example {_EXAMPLE}"
    if token.count(":") > 1 and "[" not in token:
        return _no_ipv6(token)
    if re.search(r"[^\[]\[|,", token):
        return (
            f"{token!r} is several hosts; write each on a line of its own, as `scontrol show "
            "hostnames` prints them"
        )
    return (
        f"{token!r} is not a host; write a name or an address, with user@ before it where ssh "
        "needs one"
    )


def _no_ipv6(token: str) -> str:
    return (
        f"{token!r} is an IPv6 address, and ranks meet over IPv4; write the host's name, or its "
        "IPv4 address"
    )


def _no_slots(token: str) -> str:
    meaning = "Open MPI would count its cores and DeepSpeed would refuse it"
    return f"host {token!r} has no slots; {meaning}, so write for example '{token} slots=8'"


def _unknown_key(key: str, label: str) -> str:
    hint = _close(key.lower().replace("-", "_"), _KEYS)
    return (
        f"{key!r} in {label!r} is not a key of a host file; {hint}the keys are "
        f"{' and '.join(_KEYS)}"
    )


def _close(word: str, right: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(right), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _filter(text: str, option: str, hosts: dict[str, Host]) -> dict[str, tuple[int, ...]]:
    """Return the devices that a filter names, by machine; raise one error with every problem."""
    named: dict[str, tuple[int, ...]] = {}
    complaints: list[str] = []
    for match in re.finditer(r"(?:^|(?<=@))[^@]*", text):
        if problem := _want(match[0], hosts, named):
            complaints.append(f"{option}:1:{match.start() + _column(match[0])}: {problem}")
    if complaints:
        raise HostfileError("\n".join(complaints))
    return named


def _want(item: str, hosts: dict[str, Host], named: dict[str, tuple[int, ...]]) -> str:
    """Read one ``name`` or ``name:0,1`` into ``named``; return the problem with it, or nothing."""
    bracketed, _, plain = item.strip().rpartition("]")
    name, colon, slots = plain.partition(":")
    name = bracketed.lstrip("[") + name.strip()
    if not name:
        return "a host name is missing; write for example worker-2:0,1@worker-3"
    if name not in hosts:
        return f"no such host: {name!r}; {_close(name, hosts)}the hosts are {_listed(list(hosts))}"
    if name in named:
        return f"host {name!r} is named twice; write it once, with all its slots: {name}:0,1"
    devices = {str(device): device for device in hosts[name].devices}
    wanted = [slot.strip() for slot in slots.split(",")] if colon else list(devices)
    if strange := [slot for slot in wanted if slot not in devices]:
        return (
            f"host {name!r} has no slot {_listed(strange)}; its slots are {_listed(list(devices))}"
        )
    named[name] = tuple(devices[slot] for slot in wanted)
    return ""


def _pick(host: Host, named: tuple[int, ...], drop: bool) -> Host:
    kept = tuple(device for device in host.devices if (device in named) != drop)
    return host._replace(slots=len(kept), devices=kept)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(map(repr, names[:_MOST_LISTED])) + (f" and {more} more" if more > 0 else "")


def _machine(name: str) -> str:
    return name.rpartition("@")[2]


def _column(content: str) -> int:
    return len(content) - len(content.lstrip()) + 1
