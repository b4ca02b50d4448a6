"""`--include` and `--exclude`: the hosts and devices that they keep, and all errors in them."""

from __future__ import annotations

import pytest

from ortlaunch.base.errors import HostfileError
from ortlaunch.planning.hosts import Host, filter_hosts_by_include_or_exclude, parse_hostfile
from tests.makers import host

# A name, a name with a user, and an IPv6 address.
HOSTS = parse_hostfile(
    "worker-1 slots=4\nann@worker-2 slots=4 max_slots=8\n[::1] slots=2\n", "F"
).hosts


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (None, None, {"worker-1": (0, 1, 2, 3), "ann@worker-2": (0, 1, 2, 3), "::1": (0, 1)}),
        ("worker-1", None, {"worker-1": (0, 1, 2, 3)}),
        ("worker-2:0,1@worker-1", None, {"worker-1": (0, 1, 2, 3), "ann@worker-2": (0, 1)}),
        # A filter cannot change the order, or name a device twice.
        ("worker-2:3,1,3", None, {"ann@worker-2": (1, 3)}),
        # Spaces are allowed.
        (" worker-1 : 0 , 2 @ [::1]:1 ", None, {"worker-1": (0, 2), "::1": (1,)}),
        ("[::1]", None, {"::1": (0, 1)}),
        (None, "worker-1", {"ann@worker-2": (0, 1, 2, 3), "::1": (0, 1)}),
        (None, "worker-2:0,3@[::1]", {"worker-1": (0, 1, 2, 3), "ann@worker-2": (1, 2)}),
        # A host without devices is left out.
        (None, "[::1]:0,1", {"worker-1": (0, 1, 2, 3), "ann@worker-2": (0, 1, 2, 3)}),
    ],
)
def test_select(
    include: str | None, exclude: str | None, expected: dict[str, tuple[int, ...]]
) -> None:
    """Filters follow DeepSpeed's grammar; hosts and devices keep the order of the file."""
    chosen = filter_hosts_by_include_or_exclude(HOSTS, include, exclude)
    assert {each.name: each.devices for each in chosen} == expected
    assert [each.name for each in chosen] == list(expected)
    assert all(each.slots == len(each.devices) for each in chosen)


def test_select_twice() -> None:
    """A second filter applies to the devices that the first kept, and max_slots stays."""
    once = filter_hosts_by_include_or_exclude(HOSTS, include="worker-2:2,3")
    # Slots are counted again, and devices keep their numbers.
    assert filter_hosts_by_include_or_exclude(once, exclude="worker-2:3") == (
        Host("ann@worker-2", 1, (2,), 8),
    )
    with pytest.raises(
        HostfileError, match="host 'worker-2' has no slot '0'; its slots are '2', '3'"
    ):
        filter_hosts_by_include_or_exclude(once, include="worker-2:0")


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("a", "b", ["--include and --exclude exclude each other; keep one of them"]),
        # An empty filter is a filter.
        ("", "", ["--include and --exclude exclude each other; keep one of them"]),
        (
            "",
            None,
            ["--include:1:1: a host name is missing; write for example worker-2:0,1@worker-3"],
        ),
        (
            None,
            "worker-1@",
            ["--exclude:1:10: a host name is missing; write for example worker-2:0,1@worker-3"],
        ),
        (
            "worker-1@ worker-9:0",
            None,
            [
                "--include:1:11: no such host: 'worker-9'; did you mean 'worker-2'? "
                "the hosts are 'worker-1', 'worker-2', '::1'"
            ],
        ),
        (
            "zzz",
            None,
            ["--include:1:1: no such host: 'zzz'; the hosts are 'worker-1', 'worker-2', '::1'"],
        ),
        (
            "worker-1:0,4,x",
            None,
            [
                "--include:1:1: host 'worker-1' has no slot '4', 'x'; its slots are '0', '1', "
                "'2', '3'"
            ],
        ),
        (None, "[::1]:", ["--exclude:1:1: host '::1' has no slot ''; its slots are '0', '1'"]),
        (
            "worker-1:0@worker-1:1",
            None,
            [
                "--include:1:12: host 'worker-1' is named twice; write it once, with all its "
                "slots: worker-1:0,1"
            ],
        ),
        (
            None,
            "worker-1@worker-2@[::1]:0,1",
            [
                "--exclude 'worker-1@worker-2@[::1]:0,1' leaves no slot on any host; leave at "
                "least one"
            ],
        ),
        (
            # Two problems.
            "zzz@worker-1:9",
            None,
            [
                "--include:1:1: no such host: 'zzz'; the hosts are 'worker-1', 'worker-2', '::1'",
                "--include:1:5: host 'worker-1' has no slot '9'; its slots are '0', '1', '2', '3'",
            ],
        ),
    ],
)
def test_wrong_filter(include: str | None, exclude: str | None, expected: list[str]) -> None:
    """An error in a filter names the option, the column and alternatives, for all problems at once."""
    with pytest.raises(HostfileError) as caught:
        filter_hosts_by_include_or_exclude(HOSTS, include, exclude)
    assert str(caught.value).split("\n") == expected


def test_long_lists_are_cut() -> None:
    """An error on a thousand hosts shows the first sixteen and the number of the others."""
    many = [host(f"worker-{index}", 1) for index in range(1000)]
    shown = ", ".join(f"'worker-{index}'" for index in range(16))
    # Sixteen hosts are shown completely.
    for hosts, rest in ((many, " and 984 more"), (many[:16], "")):
        with pytest.raises(HostfileError) as caught:
            filter_hosts_by_include_or_exclude(hosts, include="zzz")
        assert (
            str(caught.value) == f"--include:1:1: no such host: 'zzz'; the hosts are {shown}{rest}"
        )
