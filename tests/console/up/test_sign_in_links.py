"""Links that sign somebody in once: a second use, a late one and one from elsewhere open nothing."""

from __future__ import annotations

import pytest

from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.service.access.sign_in_links import LINK_SECONDS, LINKS_MAX, SignInLinks, is_direct


def _taken(links: SignInLinks, token: str) -> str | None:
    link = links.take(token, direct=True)
    return None if link is None else link.principal


def test_a_link_is_good_once() -> None:
    links = SignInLinks(VirtualClock())
    made = links.make("you")
    assert _taken(links, made.token) == "you"
    assert links.take(made.token, direct=True) is None


@pytest.mark.parametrize(("late_us", "who"), [(-1, "you"), (0, None), (10, None)])
def test_it_ends_after_a_minute(late_us: int, who: str | None) -> None:
    clock = VirtualClock()
    links = SignInLinks(clock)
    made = links.make("you")
    clock.advance(LINK_SECONDS * MICROSECONDS + late_us)
    assert _taken(links, made.token) == who


def test_from_elsewhere_it_opens_nothing_and_stays_unspent() -> None:
    links = SignInLinks(VirtualClock())
    made = links.make("you")
    assert links.take(made.token, direct=False) is None
    assert _taken(links, made.token) == "you"


@pytest.mark.parametrize("token", ["", "x", "x" * 43, "\udcff" * 43])
def test_what_was_never_made_opens_nothing(token: str) -> None:
    links = SignInLinks(VirtualClock())
    links.make("you")
    assert links.take(token, direct=True) is None


def test_so_many_wait_and_the_oldest_goes() -> None:
    links = SignInLinks(VirtualClock())
    made = [links.make(str(number)).token for number in range(LINKS_MAX + 1)]
    assert [_taken(links, token) for token in made] == [None, *map(str, range(1, LINKS_MAX + 1))]


@pytest.mark.parametrize(
    ("peer", "host", "forwarded", "direct"),
    [
        ("127.0.0.1", "127.0.0.1:8080", False, True),
        ("127.0.0.1", "localhost:8080", False, True),
        ("::1", "[::1]:8080", False, True),
        ("127.0.0.9", "127.0.0.1", False, True),
        ("10.0.0.7", "127.0.0.1:8080", False, False),  # from another machine
        ("127.0.0.1", "127.0.0.1:8080", True, False),  # through a proxy on this one
        ("127.0.0.1", "evil.example:8080", False, False),  # by a name that was bent to here
        ("::ffff:10.0.0.7", "127.0.0.1:8080", False, False),
        (None, "localhost", False, False),  # over the Unix socket, which proxies use
    ],
)
def test_who_is_on_this_machine(peer: str | None, host: str, forwarded: bool, direct: bool) -> None:
    assert is_direct(peer, host, forwarded=forwarded) is direct
