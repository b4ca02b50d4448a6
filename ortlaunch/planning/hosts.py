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

from ortlaunch.base.errors import IS_LFS_POINTER, LFS_POINTER, HostfileError
from ortlaunch.launch_plan import LOCAL_NAMES, is_this_host

_EXAMPLE = "'worker-1 slots=8'"
_SETTING_KEYS = ("slots", "max_slots")
# Limits against wrong files: digits of a number, names in an error, and bytes of a file.
_MOST_DIGITS = 4
_MOST_LISTED = 16
_MAX_BYTES = 10_000_000
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


class _HostSetting(NamedTuple):
    column: int
    label: str
    value: str
    has_spaces: bool = False


_Problems = list[tuple[int, str]]  # column and text


def read_hostfile(
    hostfile_path: str | os.PathLike[str], default_slots: int | None = None
) -> HostList:
    """Read a host file from disk.

    Raises:
        HostfileError: it cannot be read, is not UTF-8 or names no host.
    """
    return parse_hostfile(
        read_hostfile_text(hostfile_path), os.fspath(hostfile_path), default_slots
    )


def read_hostfile_text(hostfile_path: str | os.PathLike[str]) -> str:
    """Return the text of a host file.

    Raises:
        HostfileError: it cannot be read or is not UTF-8.
    """
    path_text = os.fspath(hostfile_path)
    try:
        data = _read_file_or_pipe_in_time(path_text)
    except OSError as error:
        raise HostfileError(
            f"{path_text}: cannot be read: {error.strerror}; give a file with lines such as {_EXAMPLE}"
        ) from error
    return _decode_utf8_or_refuse(data, path_text)


def _read_file_or_pipe_in_time(path_text: str) -> bytes:
    """Return the content of a file or pipe, such as `<(scontrol show hostnames)`.

    Raises:
        OSError: the pipe does not end in time, or the file is too large.
    """
    data = b""
    deadline = time.monotonic() + _PIPE_SECONDS
    # O_NONBLOCK, because opening a pipe without a writer would wait for ever.
    file_descriptor = os.open(path_text, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(file_descriptor, "rb", buffering=0) as file:
        while len(data) <= _MAX_BYTES:
            if not wait_for([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise OSError(errno.ETIMEDOUT, f"this pipe had no data for {_PIPE_SECONDS} s")
            chunk = os.read(file_descriptor, 1 << 16)
            if not chunk:
                return data
            data += chunk
    raise OSError(errno.EFBIG, f"it has more than {_MAX_BYTES:,} bytes")


def parse_hostfile(
    hostfile_content: str, source_name: str, default_slots: int | None = None
) -> HostList:
    """Parse the text of a host file; ``source_name`` names it in errors.

    A line without slots is an error unless ``default_slots`` gives their number. All problems are
    in one HostfileError, a line each: ``SOURCE:LINE:COLUMN: problem; remedy``.
    """
    hosts, dialect_marks = _hosts_and_dialects_of_lines(
        _numbered_lines_without_comments(hostfile_content), source_name, default_slots
    )
    if not hosts:
        raise HostfileError(
            f"{source_name}: it lists no host; write one line per host, such as {_EXAMPLE}"
        )
    return HostList(hosts, _dialect_that_fits_all_lines(dialect_marks))


def filter_hosts_by_include_or_exclude(
    hosts: Sequence[Host], include: str | None = None, exclude: str | None = None
) -> tuple[Host, ...]:
    """Keep or drop hosts and slots by DeepSpeed's grammar, ``worker-2:0,1@worker-3``.

    The order stays. A host is named without its ``user@``, because ``@`` separates hosts here; IPv6
    goes in brackets.
    """
    if include is not None and exclude is not None:
        raise HostfileError("--include and --exclude exclude each other; keep one of them")
    filter_text, option_name = (include, "--include") if exclude is None else (exclude, "--exclude")
    if filter_text is None:
        return tuple(hosts)
    devices_by_name = _devices_by_filtered_host_name(
        filter_text, option_name, {_name_without_user(host.name): host for host in hosts}
    )
    filtered_hosts = (
        _host_with_kept_or_dropped_devices(
            host,
            devices_by_name.get(_name_without_user(host.name), ()),
            drops_filtered_devices=exclude is not None,
        )
        for host in hosts
    )
    nonempty_hosts = tuple(host for host in filtered_hosts if host.slots)
    if not nonempty_hosts:
        raise HostfileError(
            f"{option_name} {filter_text!r} leaves no slot on any host; leave at least one"
        )
    return nonempty_hosts


def _decode_utf8_or_refuse(file_bytes: bytes, source_name: str) -> str:
    """Return the data as text; raise HostfileError at the first byte that is not UTF-8."""
    if file_bytes.startswith(LFS_POINTER):
        raise HostfileError(f"{source_name} {IS_LFS_POINTER}")
    try:
        return file_bytes.decode("utf-8")
    except UnicodeDecodeError as error:
        line = file_bytes.count(b"\n", 0, error.start) + 1
        column = error.start - file_bytes.rfind(b"\n", 0, error.start)
        raise HostfileError(
            f"{source_name}:{line}:{column}: byte 0x{file_bytes[error.start]:02x} is not UTF-8; save the "
            "file as UTF-8"
        ) from error


def _numbered_lines_without_comments(hostfile_content: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines with more than a comment."""
    # splitlines() would also split at form feeds.
    for line_number, line in enumerate(re.split(r"\r\n?|\n", hostfile_content.lstrip("\ufeff")), 1):
        content = line.partition("#")[0]
        if content and not content.isspace():
            yield line_number, content


def _hosts_and_dialects_of_lines(
    numbered_lines: Iterable[tuple[int, str]], source_name: str, default_slots: int | None
) -> tuple[tuple[Host, ...], set[str]]:
    """Return hosts and dialect marks of numbered lines, or raise one error with every problem."""
    hosts: list[Host] = []
    dialect_marks: set[str] = set()
    messages: list[str] = []
    location_by_name: dict[str, str] = {}
    for line_number, line_text in numbered_lines:
        problems: _Problems = []
        if host := _host_of_line_or_add_problems(line_text, default_slots, dialect_marks, problems):
            hosts.append(host)
            _add_message_if_host_repeated(
                host,
                f"{source_name}:{line_number}:{_first_column(line_text)}",
                location_by_name,
                messages,
            )
        messages += [
            f"{source_name}:{line_number}:{column}: {message}" for column, message in problems
        ]
    if len(hosts) - len(location_by_name) > 1:
        remedy = f"sort {source_name} | uniq -c | awk '{{print $2\" slots=\"$1}}'"
        messages.append(f"{source_name}: of a list with a name for each slot (PBS, LSF): {remedy}")
    if messages:
        raise HostfileError("\n".join(messages))
    return tuple(hosts), dialect_marks


def _add_message_if_host_repeated(
    host: Host, host_location: str, location_by_name: dict[str, str], messages: list[str]
) -> None:
    # Compared without user and letter case: two names of one machine would put two ranks on one
    # device.
    name = _name_without_user(host.name).lower()
    first_location = location_by_name.setdefault(name, host_location)
    if first_location != host_location:
        remedy = (
            "Open MPI would add up the slots and DeepSpeed would refuse; write it once with "
            "all its slots"
        )
        messages.append(f"{host_location}: host {name!r} is already at {first_location}; {remedy}")


def _host_of_line_or_add_problems(
    line_text: str, default_slots: int | None, dialect_marks: set[str], problems: _Problems
) -> Host | None:
    """Return the host on one line, and add the mark of its dialect; None when ``problems`` grew."""
    column = _first_column(line_text)
    host_token = line_text.split(None, 1)[0]
    name, colon_slots = _name_and_slots_or_add_problem(host_token, column, problems)
    settings = (
        {} if colon_slots is None else {"slots": _HostSetting(column, host_token, colon_slots)}
    )
    _parse_settings_of_host_line(line_text, column - 1 + len(host_token), settings, problems)
    if not problems and default_slots is None and "slots" not in settings:
        problems.append((column, _missing_slots_message(host_token)))
    number_by_key = {
        key: _setting_number_or_add_problem(parsed_setting, problems)
        for key, parsed_setting in settings.items()
    }
    slots = number_by_key.get("slots", default_slots or 0)
    max_slots = number_by_key.get("max_slots")
    if not problems and max_slots is not None and max_slots < slots:
        message = f"max_slots={max_slots} is below slots={slots}; make it {slots} or more, or leave it out"
        problems.append((settings["max_slots"].column, message))
    if problems:
        return None
    dialect_marks.add(_dialect_of_line_or_empty(settings, colon_slots))
    return Host(name, slots, tuple(range(slots)), max_slots)


def _name_and_slots_or_add_problem(
    host_token: str, column: int, problems: _Problems
) -> tuple[str, str | None]:
    """Return name and slots of ``user@[::1]:4``: ``user@::1`` and ``4``, or None without a colon."""
    match = _NAME.fullmatch(host_token)
    if match is None:
        problems.append((column, _invalid_host_name_message(host_token)))
        return "", None
    user, ipv6, plain_name, colon_slots = match.groups()
    if ipv6 and ipv6 not in LOCAL_NAMES:
        problems.append((column, _ipv6_message(host_token)))
    return user + (ipv6 or plain_name), colon_slots and colon_slots[1:]


def _parse_settings_of_host_line(
    line_text: str, start_offset: int, setting_by_key: dict[str, _HostSetting], problems: _Problems
) -> None:
    """Add the ``key=value`` pairs behind the host name to ``setting_by_key``; max-slots is max_slots."""
    for match in _SETTING.finditer(line_text, start_offset):
        key, equals_sign, value, unparsed_text = match.groups()
        column = match.start() + 1
        label = match[0].rstrip()
        known_key = (key or "").replace("-", "_")
        if unparsed_text:
            problems.append(
                (column, f"{label!r} is not understood; write key=value, such as slots=8")
            )
        elif known_key not in _SETTING_KEYS:
            problems.append((column, _unknown_key_message(key, label)))
        elif known_key in setting_by_key:
            problems.append(
                (
                    column,
                    f"{label!r} comes after {setting_by_key[known_key].label!r}; write {known_key} once",
                )
            )
        else:
            setting_by_key[known_key] = _HostSetting(column, label, value, equals_sign != "=")


def _setting_number_or_add_problem(parsed_setting: _HostSetting, problems: _Problems) -> int:
    """Return the number in a setting, or 0 and a new problem."""
    column, label, value, _ = parsed_setting
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


def _dialect_of_line_or_empty(
    settings_by_key: dict[str, _HostSetting], colon_slots: str | None
) -> str:
    """Return the dialect that a line belongs to; empty for a bare name."""
    if colon_slots is not None:
        return "MPICH / Intel MPI"
    if "max_slots" in settings_by_key or any(
        parsed_setting.has_spaces for parsed_setting in settings_by_key.values()
    ):
        return "Open MPI"
    return "DeepSpeed / Open MPI" if settings_by_key else ""


def _dialect_that_fits_all_lines(dialect_marks: set[str]) -> str:
    """Return the dialect that fits all lines.

    One line that only Open MPI reads makes it an Open MPI file.
    """
    named_dialects = (
        dialect_marks - {"", "DeepSpeed / Open MPI"}
        if "Open MPI" in dialect_marks
        else dialect_marks - {""}
    )
    return " and ".join(sorted(named_dialects)) or "names only"


def _invalid_host_name_message(host_token: str) -> str:
    if "=" in host_token:
        return f"a host name is missing before {host_token!r}; write for example {_EXAMPLE}"
    if host_token.count(":") > 1 and "[" not in host_token:
        return _ipv6_message(host_token)
    if re.search(r"[^\[]\[|,", host_token):
        return (
            f"{host_token!r} is several hosts; write each on a line of its own, as `scontrol show "
            "hostnames` prints them"
        )
    return (
        f"{host_token!r} is not a host; write a name or an address, with user@ before it where ssh "
        "needs one"
    )


def _ipv6_message(host_token: str) -> str:
    return (
        f"{host_token!r} is an IPv6 address, and ranks meet over IPv4; write the host's name, or its "
        "IPv4 address"
    )


def _missing_slots_message(host_token: str) -> str:
    meaning = "Open MPI would count its cores and DeepSpeed would refuse it"
    return (
        f"host {host_token!r} has no slots; {meaning}, so write for example '{host_token} slots=8'"
    )


def _unknown_key_message(key: str, label: str) -> str:
    guess_text = _closest_word_text(key.lower().replace("-", "_"), _SETTING_KEYS)
    return (
        f"{key!r} in {label!r} is not a key of a host file; {guess_text}the keys are "
        f"{' and '.join(_SETTING_KEYS)}"
    )


def _closest_word_text(misspelt_word: str, known_words: Iterable[str]) -> str:
    closest_words = difflib.get_close_matches(misspelt_word, list(known_words), n=1)
    return f"did you mean {closest_words[0]!r}? " if closest_words else ""


def _devices_by_filtered_host_name(
    filter_text: str, option_name: str, host_by_name: dict[str, Host]
) -> dict[str, tuple[int, ...]]:
    """Return the devices that a filter names, by machine; raise one error with every problem."""
    devices_by_name: dict[str, tuple[int, ...]] = {}
    messages: list[str] = []
    for match in re.finditer(r"(?:^|(?<=@))[^@]*", filter_text):
        if message := _add_filtered_devices_or_problem_text(
            match[0], host_by_name, devices_by_name
        ):
            messages.append(f"{option_name}:1:{match.start() + _first_column(match[0])}: {message}")
    if messages:
        raise HostfileError("\n".join(messages))
    return devices_by_name


def _add_filtered_devices_or_problem_text(
    filter_item: str, host_by_name: dict[str, Host], devices_by_name: dict[str, tuple[int, ...]]
) -> str:
    """Read one ``name`` or ``name:0,1`` into ``devices_by_name``; return the problem with it, or nothing."""
    bracketed_name, _, plain_text = filter_item.strip().rpartition("]")
    name, colon, slots_text = plain_text.partition(":")
    name = bracketed_name.lstrip("[") + name.strip()
    if not name:
        return "a host name is missing; write for example worker-2:0,1@worker-3"
    if name not in host_by_name:
        return (
            f"no such host: {name!r}; {_closest_word_text(name, host_by_name)}the hosts are "
            f"{_shorten_names(list(host_by_name))}"
        )
    if name in devices_by_name:
        return f"host {name!r} is named twice; write it once, with all its slots: {name}:0,1"
    device_by_text = {str(device): device for device in host_by_name[name].devices}
    slot_texts = [slot.strip() for slot in slots_text.split(",")] if colon else list(device_by_text)
    if unknown_slots := [slot for slot in slot_texts if slot not in device_by_text]:
        return (
            f"host {name!r} has no slot {_shorten_names(unknown_slots)}; its slots are "
            f"{_shorten_names(list(device_by_text))}"
        )
    devices_by_name[name] = tuple(device_by_text[slot] for slot in slot_texts)
    return ""


def _host_with_kept_or_dropped_devices(
    host: Host, filtered_devices: tuple[int, ...], drops_filtered_devices: bool
) -> Host:
    kept_devices = tuple(
        device for device in host.devices if (device in filtered_devices) != drops_filtered_devices
    )
    return host._replace(slots=len(kept_devices), devices=kept_devices)


def _shorten_names(names: Sequence[str]) -> str:
    further_count = len(names) - _MOST_LISTED
    return ", ".join(map(repr, names[:_MOST_LISTED])) + (
        f" and {further_count} more" if further_count > 0 else ""
    )


def _name_without_user(host_name: str) -> str:
    return host_name.rpartition("@")[2]


def _first_column(line_text: str) -> int:
    return len(line_text) - len(line_text.lstrip()) + 1
