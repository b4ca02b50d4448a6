"""Host files and host lists: every dialect, and all errors in them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ortlaunch.base.errors import HostfileError
from ortlaunch.planning import hosts
from ortlaunch.planning.hosts import Host, HostList, parse_hostfile, read_hostfile
from tests.makers import host

EXAMPLES = Path(__file__).parents[3] / "hostfiles"
BOTH = "DeepSpeed / Open MPI"
NO_SLOTS = "Open MPI would count its cores and DeepSpeed would refuse it, so write for example"
SEVERAL = (
    "is several hosts; write each on a line of its own, as `scontrol show hostnames` prints them"
)
NO_IPV6 = "is an IPv6 address, and ranks meet over IPv4; write the host's name, or its IPv4 address"
NOT_A_HOST = "is not a host; write a name or an address, with user@ before it where ssh needs one"
ONCE = (
    "Open MPI would add up the slots and DeepSpeed would refuse; write it once with all its slots"
)
KEYS = "the keys are slots and max_slots"


def refused(read: Callable[..., HostList], *given: Any) -> str:
    """Return the message of the error that reading this raises."""
    with pytest.raises(HostfileError) as caught:
        read(*given)
    return str(caught.value)


def complaints(text: str, default_slots: int | None = None) -> list[str]:
    """Return the lines of the error that ``text`` raises as the host file F."""
    return refused(parse_hostfile, text, "F", default_slots).split("\n")


@pytest.mark.parametrize(
    ("line", "expected", "dialect"),
    [
        ("h slots=4", host("h", 4), BOTH),
        ("h\tslots=4\t", host("h", 4), BOTH),
        ("   h    slots=4", host("h", 4), BOTH),
        # A leading zero does not make the number octal.
        ("h slots=04", host("h", 4), BOTH),
        ("h slots=4 # four of eight", host("h", 4), BOTH),
        ("h slots=4#four of eight", host("h", 4), BOTH),
        ("user@10.0.0.1 slots=2", host("user@10.0.0.1", 2), BOTH),
        ("gpu_node-1.example.com slots=2", host("gpu_node-1.example.com", 2), BOTH),
        # A link-local address has a zone.
        ("[::1] slots=2", host("::1", 2), BOTH),
        ("h slots = 4", host("h", 4), "Open MPI"),
        ("h slots =4", host("h", 4), "Open MPI"),
        ("h slots=4 max_slots=4", host("h", 4, 4), "Open MPI"),
        ("h max-slots=8 slots=4", host("h", 4, 8), "Open MPI"),
        ("h max_slots = 8 slots = 4", host("h", 4, 8), "Open MPI"),
        ("h:4", host("h", 4), "MPICH / Intel MPI"),
        ("h:9999", host("h", 9999), "MPICH / Intel MPI"),
        ("user@h:4 # note", host("user@h", 4), "MPICH / Intel MPI"),
        ("[::1]:4", host("::1", 4), "MPICH / Intel MPI"),
    ],
)
def test_one_line(line: str, expected: Host, dialect: str) -> None:
    """Each form of a host gives the same Host and names its dialect."""
    assert parse_hostfile(line + "\n", "F") == ((expected,), dialect)


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("a slots=1\nb slots=2\n", BOTH),
        ("a slots=1\nb slots = 2\n", "Open MPI"),
        ("a slots=1 max_slots=1\nb slots=2\n", "Open MPI"),
        ("a:1\nb:2", "MPICH / Intel MPI"),
        ("a slots=1\nb:2", "DeepSpeed / Open MPI and MPICH / Intel MPI"),
    ],
)
def test_dialect_of_a_file(text: str, dialect: str) -> None:
    """A file's dialect is that of all lines; one line that only Open MPI reads decides."""
    assert parse_hostfile(text, "F") == (
        (host("a", 1, 1 if "max" in text else None), host("b", 2)),
        dialect,
    )


@pytest.mark.parametrize(
    "text",
    [
        "# head\n\nz slots=2\n  # indented\n \t \na slots=1",
        "z slots=2\r\na slots=1\r\n",
        # Line endings of old Macs.
        "z slots=2\ra slots=1",
        "\ufeffz slots=2\na slots=1\n",
    ],
)
def test_lines_that_are_skipped_and_order(text: str) -> None:
    """Comments, blank lines, a BOM and line endings do not change the hosts or their order."""
    assert parse_hostfile(text, "F").hosts == (host("z", 2), host("a", 1))


def test_default_slots() -> None:
    """A bare host has the default slots; slots in the file replace the default."""
    assert parse_hostfile("a\nb slots=2\n", "F", default_slots=8) == (
        (host("a", 8), host("b", 2)),
        BOTH,
    )
    assert parse_hostfile("a\nb # c\n", "F", default_slots=8) == (
        (host("a", 8), host("b", 8)),
        "names only",
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("h", [f"F:1:1: host 'h' has no slots; {NO_SLOTS} 'h slots=8'"]),
        ("  u@h max_slots=4", [f"F:1:3: host 'u@h' has no slots; {NO_SLOTS} 'u@h slots=8'"]),
        ("h slots=0", ["F:1:3: 'slots=0' is below 1; write 1 or more, or delete the line"]),
        ("h slots=-2", ["F:1:3: 'slots=-2' is below 1; write 1 or more, or delete the line"]),
        ("h:0", ["F:1:1: 'h:0' is below 1; write 1 or more, or delete the line"]),
        (
            "h slots=1 max_slots=0",
            ["F:1:11: 'max_slots=0' is below 1; write 1 or more, or delete the line"],
        ),
        (
            "h slots=4abc",
            ["F:1:3: 'slots=4abc' does not end in a whole number; write for example slots=8"],
        ),
        (
            # A digit that Python's int() would accept.
            "h slots=٤",
            ["F:1:3: 'slots=٤' does not end in a whole number; write for example slots=8"],
        ),
        (
            "h slots = 4.5",
            ["F:1:3: 'slots = 4.5' does not end in a whole number; write for example slots=8"],
        ),
        (
            "h slots==4",
            ["F:1:3: 'slots==4' does not end in a whole number; write for example slots=8"],
        ),
        ("h slots=", ["F:1:3: 'slots=' does not end in a whole number; write for example slots=8"]),
        (
            "h slots= ",
            ["F:1:3: 'slots=' does not end in a whole number; write for example slots=8"],
        ),
        ("h:4abc", ["F:1:1: 'h:4abc' does not end in a whole number; write for example slots=8"]),
        ("h:", ["F:1:1: 'h:' does not end in a whole number; write for example slots=8"]),
        ("h slots=12345", ["F:1:3: 'slots=12345' has over 4 digits; write the number of devices"]),
        (
            "h max_slots=2 slots=4",
            ["F:1:3: max_slots=2 is below slots=4; make it 4 or more, or leave it out"],
        ),
        (
            "h slot=4",
            [
                "F:1:3: 'slot' in 'slot=4' is not a key of a host file; did you mean 'slots'? "
                f"{KEYS}"
            ],
        ),
        (
            "h slots=4 Max-Slot=4",
            [
                "F:1:11: 'Max-Slot' in 'Max-Slot=4' is not a key of a host file; did you mean "
                f"'max_slots'? {KEYS}",
            ],
        ),
        (
            "h SLOTS=4",
            [
                "F:1:3: 'SLOTS' in 'SLOTS=4' is not a key of a host file; did you mean 'slots'? "
                f"{KEYS}"
            ],
        ),
        ("h port=22 slots=4", [f"F:1:3: 'port' in 'port=22' is not a key of a host file; {KEYS}"]),
        ("h slots=4 slots=2", ["F:1:11: 'slots=2' comes after 'slots=4'; write slots once"]),
        ("h:4 slots=4", ["F:1:5: 'slots=4' comes after 'h:4'; write slots once"]),
        (
            "h slots=2 max_slots=4 max-slots=4",
            ["F:1:23: 'max-slots=4' comes after 'max_slots=4'; write max_slots once"],
        ),
        ("h 4", ["F:1:3: '4' is not understood; write key=value, such as slots=8"]),
        (
            "h slots=4 extra",
            ["F:1:11: 'extra' is not understood; write key=value, such as slots=8"],
        ),
        (
            "h = 4",
            [
                "F:1:3: '=' is not understood; write key=value, such as slots=8",
                "F:1:5: '4' is not understood; write key=value, such as slots=8",
            ],
        ),
        (
            "slots=4",
            [
                "F:1:1: a host name is missing before 'slots=4'; write for example 'worker-1 slots=8'"
            ],
        ),
        (
            "fe80::1 slots=2",
            [f"F:1:1: 'fe80::1' {NO_IPV6}"],
        ),
        ("root@[FD00::a]:4", [f"F:1:1: 'root@[FD00::a]:4' {NO_IPV6}"]),
        (
            # ssh would treat such a name as an option.
            "-oProxyCommand=x slots=2",
            [
                "F:1:1: a host name is missing before '-oProxyCommand=x'; write for example 'worker-1 "
                "slots=8'"
            ],
        ),
        ("-h slots=2", [f"F:1:1: '-h' {NOT_A_HOST}"]),
        ("h!:4", [f"F:1:1: 'h!:4' {NOT_A_HOST}"]),
        ("a,b slots=2", [f"F:1:1: 'a,b' {SEVERAL}"]),
        ("node[1-2]", [f"F:1:1: 'node[1-2]' {SEVERAL}"]),
        ("u@ slots=2", [f"F:1:1: 'u@' {NOT_A_HOST}"]),
        ("[1] slots=2", [f"F:1:1: '[1]' {NOT_A_HOST}"]),
        ("hôte slots=2", [f"F:1:1: 'hôte' {NOT_A_HOST}"]),
        # A shell would run the second part.
        ("h;reboot slots=2", [f"F:1:1: 'h;reboot' {NOT_A_HOST}"]),
    ],
)
def test_wrong_line(line: str, expected: list[str]) -> None:
    """An error names line, column, value and a remedy."""
    assert complaints(line) == expected


@pytest.mark.parametrize(
    ("text", "name", "first", "second"),
    [
        ("h slots=4\nh slots=4\n", "h", "F:1:1", "F:2:1"),
        ("# head\nh:4\n\n  h:4\n", "h", "F:2:1", "F:4:3"),
        # Names of hosts do not depend on letter case.
        ("Worker slots=4\nworker slots=4\n", "worker", "F:1:1", "F:2:1"),
        ("ann@h slots=4\nbob@h slots=4\n", "h", "F:1:1", "F:2:1"),
        ("[::1]:4\nroot@[::1]:4\n", "::1", "F:1:1", "F:2:1"),
    ],
)
def test_repeated_host(text: str, name: str, first: str, second: str) -> None:
    """A machine that is named twice is refused, with any user and letter case."""
    assert complaints(text) == [f"{second}: host {name!r} is already at {first}; {ONCE}"]


def test_a_name_for_each_slot() -> None:
    """The list of a scheduler with a name for each slot has a remedy, said once."""
    said = complaints("a slots=1\nb slots=1\na slots=1\nb slots=1\n")
    assert len(said) == 3
    assert "sort F | uniq -c | awk '{print $2\" slots=\"$1}'" in said[-1]


def test_all_problems_at_once() -> None:
    """One error has every problem of every line, in the order of the file."""
    assert complaints(
        "a slot=4 extra\nb slots=2\n\nc:0 # none\nb slots=2\nd slots=x max_slots=0\ne\n"
    ) == [
        f"F:1:3: 'slot' in 'slot=4' is not a key of a host file; did you mean 'slots'? {KEYS}",
        "F:1:10: 'extra' is not understood; write key=value, such as slots=8",
        "F:4:1: 'c:0' is below 1; write 1 or more, or delete the line",
        f"F:5:1: host 'b' is already at F:2:1; {ONCE}",
        "F:6:3: 'slots=x' does not end in a whole number; write for example slots=8",
        "F:6:11: 'max_slots=0' is below 1; write 1 or more, or delete the line",
        f"F:7:1: host 'e' has no slots; {NO_SLOTS} 'e slots=8'",
    ]


def test_default_slots_above_max_slots() -> None:
    """The default is compared with max_slots, like slots in the file."""
    assert complaints("h max_slots=2", default_slots=4) == [
        "F:1:3: max_slots=2 is below slots=4; make it 4 or more, or leave it out"
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "\ufeff"])
def test_no_host(text: str) -> None:
    """A file without a host is an error; it never means the local host."""
    assert complaints(text) == [
        "F: it lists no host; write one line per host, such as 'worker-1 slots=8'"
    ]


@pytest.mark.parametrize(
    ("name", "dialect", "names", "slots"),
    [
        ("deepspeed", BOTH, ["worker-1", "worker-2", "worker-3"], [8, 8, 4]),
        ("openmpi", "Open MPI", ["worker-1", "worker-2", "train@10.0.0.13"], [8, 8, 4]),
        ("mpich", "MPICH / Intel MPI", ["worker-1", "worker-2", "worker-3"], [8, 8, 4]),
    ],
)
def test_examples(name: str, dialect: str, names: list[str], slots: list[int]) -> None:
    """Every example in hostfiles/ is read in the dialect of its name."""
    read = read_hostfile(EXAMPLES / name)
    assert read.dialect == dialect
    assert [each.name for each in read.hosts] == names
    assert [each.slots for each in read.hosts] == slots


def test_every_example_is_tested() -> None:
    """Every example in hostfiles/ is in the test above."""
    assert {path.name for path in EXAMPLES.iterdir()} == {"deepspeed", "openmpi", "mpich"}


def test_read_hostfile(tmp_path: Path) -> None:
    """A file is read by path or string, and errors name its path."""
    path = tmp_path / "hosts"
    # With a BOM and Windows line endings.
    path.write_bytes(b"\xef\xbb\xbfa slots=2\r\nb\r\n")
    assert read_hostfile(str(path), default_slots=3).hosts == (host("a", 2), host("b", 3))
    assert (
        refused(read_hostfile, path) == f"{path}:2:1: host 'b' has no slots; {NO_SLOTS} 'b slots=8'"
    )


def test_unreadable_file(tmp_path: Path) -> None:
    """A missing file and a folder are errors with the system's reason."""
    mend = "give a file with lines such as 'worker-1 slots=8'"
    for path, reason in (
        (tmp_path / "none", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        assert refused(read_hostfile, path) == f"{path}: cannot be read: {reason}; {mend}"


@pytest.mark.parametrize(
    ("data", "place", "byte"),
    [(b"a slots=1\nb\xe9 slots=1\n", "2:2", "e9"), ("a slots=1\n".encode("utf-16"), "1:1", "ff")],
)
def test_not_utf8(tmp_path: Path, data: bytes, place: str, byte: str) -> None:
    """A file that is not UTF-8 is refused at its first wrong byte."""
    path = tmp_path / "hosts"
    path.write_bytes(data)
    assert (
        refused(read_hostfile, path)
        == f"{path}:{place}: byte 0x{byte} is not UTF-8; save the file as UTF-8"
    )


def test_ten_thousand_lines() -> None:
    """Ten thousand lines are parsed in less than half a second of CPU."""
    lines = 10_000
    # It takes less than 0.1 s; the rest is for slow and busy machines.
    seconds = 0.5
    text = "".join(f"worker-{index:05d} slots=8\n" for index in range(lines))
    # Another test's objects may be collected in the first try, for as long.
    assert min(_parsing(text, lines) for _ in range(3)) < seconds


def _parsing(text: str, lines: int) -> float:
    """Return the CPU time of parsing a hostfile, which other processes do not increase."""
    before = time.process_time()
    assert len(parse_hostfile(text, "F").hosts) == lines
    return time.process_time() - before


def test_a_pipe_is_read_and_nothing_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe is read; an endless device, and a pipe without a writer, are errors."""
    # As the shell makes it for `--hostfile <(scontrol show hostnames)`.
    reader, writer = os.pipe()
    os.write(writer, b"a slots=2\n")
    os.close(writer)
    assert read_hostfile(f"/dev/fd/{reader}").hosts == (Host("a", 2, (0, 1)),)
    os.close(reader)
    os.mkfifo(tmp_path / "pipe")
    # The test does not wait.
    monkeypatch.setattr(hosts, "_PIPE_SECONDS", 0)
    assert "cannot be read: this pipe had no data for 0 s" in refused(
        read_hostfile, tmp_path / "pipe"
    )
    monkeypatch.setattr(hosts, "_PIPE_SECONDS", 10)
    assert "/dev/zero: cannot be read: it has more than 10,000,000 bytes" in refused(
        read_hostfile, "/dev/zero"
    )
