"""What was made with a key ends with it: sessions, links, answers that are held open, and further keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvcustody.clock import MICROSECONDS
from kvcustody.governance.api.operations import event_stream
from kvcustody.governance.credentials.api_key import prefix_of
from kvcustody.governance.service.access import principals as book_module
from kvcustody.governance.service.access.authenticator import ServiceAuthenticator
from kvcustody.governance.service.access.roles import Role
from kvcustody.governance.service.access.sessions import Sessions
from kvcustody.governance.service.problem_details import ProblemError
from kvcustody.governance.service.service import Service
from standins.service.service_world import Server, recorded


@pytest.fixture(scope="module")
def service(service_on_each: Service) -> Service:
    return service_on_each


def session_of(client: Any, key: str) -> dict[str, str]:
    """The headers of an act in a session that was begun with a key."""
    begun = client("POST", "/v1/session", key)
    return {"Cookie": begun.headers["set-cookie"].split(";")[0], "X-CSRF-Token": begun.json()["csrf"]}


def rotated(client: Any, key: str | None = None, **how: Any) -> dict[str, Any]:
    """The answer to a rotation with an overlap."""
    body = {"days": 90, "overlap_days": 1}
    answer = client("POST", "/v1/keys:rotate", key, json=body, **how)
    return {"status": answer.status_code, **answer.json()}


def works(client: Any, key: str | None = None, **how: Any) -> bool:
    return bool(client("GET", "/v1/whoami", key, **how).status_code == 200)


def by_revoking(service: Service, key: str) -> None:
    service.principals.revoke_key(str(prefix_of(key)), by="test")


def by_revoking_all(service: Service, key: str) -> None:
    name = service.principals.by_key(prefix_of(key), key)
    assert name is not None
    service.principals.revoke_keys(name[0].name, by="test")


def by_replacing(service: Service, key: str) -> None:
    found = service.principals.by_key(prefix_of(key), key)
    assert found is not None
    service.principals.issue_key(found[0].name, days=1, overlap_days=0, by="test")


def by_disabling(service: Service, key: str) -> None:
    found = service.principals.by_key(prefix_of(key), key)
    assert found is not None
    service.principals.disable(found[0].name, by="test")


ENDINGS = [by_revoking, by_revoking_all, by_replacing, by_disabling]


@pytest.mark.parametrize("end", ENDINGS)
def test_a_session_ends_with_the_key_that_it_was_begun_with(
    service: Service, client, people, end: Callable[[Service, str], None]
) -> None:
    key = people.add(f"session-{end.__name__}", Role.AUDITOR)
    other = service.principals.issue_key(f"session-{end.__name__}", days=1, by="test").key
    session, of_other = session_of(client, key), session_of(client, other)
    assert works(client, headers=session) and works(client, headers=of_other), "control: both stand"
    end(service, key)
    assert not works(client, headers=session)
    assert rotated(client, headers=session)["status"] == 401
    assert works(client, headers=of_other) is (end is by_revoking), "control: the other key's session"


def test_without_the_check_the_session_of_a_revoked_key_makes_a_key(
    service: Service, client, people, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: the defence off, the attack succeeds."""
    key = people.add("attacked", Role.AUDITOR)
    session = session_of(client, key)
    by_revoking(service, key)
    assert rotated(client, headers=session)["status"] == 401
    everything = lambda _connection, _name, _now_us: [str(prefix_of(key))]  # noqa: E731
    monkeypatch.setattr("kvcustody.governance.service.access.sessions.valid_keys", everything)
    monkeypatch.setattr(book_module, "valid_keys", everything)
    made = rotated(client, headers=session)
    monkeypatch.undo()
    assert made["status"] == 201 and works(client, made["key"])


def test_a_session_ends_when_its_key_expires(make_service, make_client, make_people) -> None:
    service = make_service()
    client = make_client(service)
    make_people(service).add("brief", Role.AUDITOR)
    key = service.principals.issue_key("brief", days=1, by="test")
    session = session_of(client, key.key)
    assert works(client, headers=session)
    with service.engine.begin() as connection:
        table = book_module.service_keys
        past_us = service.clock.utc_us() - 1
        connection.execute(table.update().where(table.c.prefix == key.prefix).values(expires_us=past_us))
    assert not works(client, headers=session)


def test_a_session_of_another_form_or_with_another_key_named_in_it_is_none(client, people) -> None:
    session = session_of(client, people["auditor"])
    cookie = session["Cookie"]
    for forged in (cookie.rpartition(".")[0], cookie.rpartition(".")[0] + ".", cookie[:-12] + "0" * 12):
        assert not works(client, headers={**session, "Cookie": forged}), forged
    assert works(client, headers=session)


def test_a_key_that_was_made_in_a_session_expires_with_it_and_with_its_key(service: Service, client, people) -> None:
    key = people.add("ivy", Role.AUDITOR)
    expires_us = service.principals.expiry(str(prefix_of(key)))
    made = rotated(client, headers=session_of(client, key))
    session_us = service.settings.session_minutes * 60 * MICROSECONDS
    assert made["status"] == 201 and expires_us is not None
    assert made["expires_us"] <= min(expires_us, service.clock.utc_us() + session_us)
    direct = rotated(client, made["key"])
    assert direct["expires_us"] > service.clock.utc_us() + 80 * 86_400 * MICROSECONDS, (
        "control: a key that replaces the key that is shown lives as long as asked"
    )


@pytest.mark.parametrize("in_session", [False, True])
def test_revoking_a_key_ends_every_key_that_was_made_with_it(
    service: Service, client, people, in_session: bool
) -> None:
    name = f"jane-{in_session}"
    key = people.add(name, Role.AUDITOR)
    apart = service.principals.issue_key(name, days=1, by="test").key
    child = rotated(client, headers=session_of(client, key))["key"] if in_session else rotated(client, key)["key"]
    grandchild = rotated(client, child)["key"]
    assert all(works(client, found) for found in (key, child, grandchild, apart)), "control: all work"
    by_revoking(service, key)
    assert [works(client, found) for found in (key, child, grandchild)] == [False] * 3
    assert works(client, apart), "an administrator's key stands alone"
    late = rotated(client, apart)["key"]
    by_revoking(service, key)
    assert works(client, late)


def kept(client: Any, asker: str, name: str, key: str, days: int = 30) -> int:
    body = {"name": name, "prefix": prefix_of(key), "days": days}
    return int(client("POST", "/v1/principals:keep-key", asker, json=body).status_code)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "control: not kept"])
def test_a_key_that_another_administrator_keeps_outlives_the_key_it_was_made_with(
    service: Service, client, people, keeps: bool
) -> None:
    name = f"kept-{keeps}"
    key = people.add(name, Role.AUDITOR)
    child = rotated(client, headers=session_of(client, key))["key"]
    grandchild = rotated(client, child)["key"]
    if keeps:
        assert kept(client, people["key-custodian"], name, child) == 200
        assert kept(client, people["key-custodian"], name, child) == 409, "it stands alone"
    made_with = {found.prefix: found.made_with for found in service.principals.keys(name)}
    parent = None if keeps else prefix_of(key)
    assert made_with == {
        prefix_of(key): None,
        prefix_of(child): parent,
        prefix_of(grandchild): prefix_of(child),
    }
    by_revoking(service, key)
    assert [works(client, found) for found in (key, child, grandchild)] == [False, keeps, keeps]
    if keeps:
        expires_us = service.principals.expiry(str(prefix_of(child)))
        assert expires_us is not None
        assert expires_us > service.clock.utc_us() + 29 * 86_400 * MICROSECONDS
        by_revoking(service, child)
        assert not works(client, grandchild), "what was made with it ends with it still"


def test_nobody_keeps_a_key_of_their_own_or_one_that_has_ended(service: Service, client, people) -> None:
    """Custodians too: with the one defence off, whoever stole a custodian's key keeps what they made with it."""
    key = people.add("carla", Role.KEY_CUSTODIAN)
    child = rotated(client, headers=session_of(client, key))["key"]
    assert kept(client, key, "carla", child) == 409
    assert kept(client, child, "carla", child) == 409
    assert kept(client, people["auditor"], "carla", child) == 403
    assert kept(client, people["key-custodian"], "auditor", child) == 404, "another's key is absent"
    assert kept(client, people["key-custodian"], "carla", child) == 200, "control: another custodian keeps it"
    other = rotated(client, headers=session_of(client, key))["key"]
    by_revoking(service, key)
    assert kept(client, people["key-custodian"], "carla", other) == 409 and not works(client, other)
    assert ("key-kept", "key-custodian") in recorded(service, "carla")


def test_a_thief_who_revokes_the_stolen_key_keeps_nothing(service: Service, client, people) -> None:
    """The key that asks is spared by its own request; whoever revokes the first key later ends it all the same."""
    key = people.add("kim", Role.AUDITOR)
    stolen = rotated(client, key)["key"]
    assert client("DELETE", f"/v1/keys/{prefix_of(key)}", stolen).status_code == 204
    assert works(client, stolen), "control: whoever rotates may end the old key with the new one"
    by_revoking(service, key)
    assert not works(client, stolen)


@pytest.mark.parametrize("end", ENDINGS)
def test_an_answer_that_is_held_open_in_a_session_is_not_given_once_it_ended(
    service: Service, client, people, end: Callable[[Service, str], None]
) -> None:
    key = people.add(f"held-{end.__name__}", Role.AUDITOR)
    cookie = session_of(client, key)["Cookie"].partition("=")[2]
    caller = service.authenticator.of_session(cookie)
    assert caller is not None
    service.authenticator.check_still_valid(caller)
    end(service, key)
    with pytest.raises(ProblemError):
        service.authenticator.check_still_valid(caller)


def test_an_answer_that_is_held_open_ends_with_its_session_and_its_token(service: Service, client, people) -> None:
    cookie = session_of(client, people["auditor"])["Cookie"].partition("=")[2]
    caller = service.authenticator.of_session(cookie)
    assert caller is not None
    token = caller._replace(by="token", session="", key="", until_us=service.clock.utc_us() + MICROSECONDS * 60)
    service.authenticator.check_still_valid(token)
    service.sessions.end(cookie)
    for ended in (caller, token._replace(until_us=service.clock.utc_us())):
        with pytest.raises(ProblemError):
            service.authenticator.check_still_valid(ended)


def test_a_stream_that_is_held_open_in_a_session_ends_with_the_key(
    service: Service, client, people, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a socket, within its wait. Control: the same question of another key stays open meanwhile."""
    asked: list[object] = []
    read = event_stream.read_in_commit_order

    def reading(*given: Any, **how: Any) -> Any:
        asked.append(given)
        return read(*given, **how)

    monkeypatch.setattr(event_stream, "read_in_commit_order", reading)
    key = people.add("streams", Role.TENANT_VIEWER, "acme")
    cookie = {"Cookie": session_of(client, key)["Cookie"]}
    path, answers = "/v1/audit/stream?begin=newest&wait=30", dict[str, int]()
    server = Server(service)

    def ask(who: str, headers: dict[str, str]) -> None:
        answers[who] = httpx.get(server.address + path, headers=headers, timeout=60).status_code

    stays = people.add("stays", Role.TENANT_VIEWER, "acme")
    held = [
        threading.Thread(target=ask, args=("ended", cookie)),
        threading.Thread(target=ask, args=("stays", {"Authorization": f"Bearer {stays}"})),
    ]
    try:
        for thread in held:
            thread.start()
        while len(asked) < 6:  # each has looked, and looks again
            assert all(thread.is_alive() for thread in held)
            time.sleep(0.02)
        by_revoking(service, key)
        held[0].join(20)
        assert answers == {"ended": 401}
        service.stopping.set()
        held[1].join(20)
        assert answers == {"ended": 401, "stays": 200}
    finally:
        service.stopping.clear()
        server.close()


def test_a_link_ends_when_its_principal_is_narrowed(service: Service, people) -> None:
    from kvcustody.governance.api.http.console_mount import log_in_by_link

    key = people.add("lou", Role.AUDITOR)
    kept, ended = service.sign_in_links.make("lou").token, service.sign_in_links.make("lou").token
    assert log_in_by_link(service, kept, direct=True, tls=False).caller.name == "lou", "control: a link signs in"
    by_revoking(service, key)
    with pytest.raises(ProblemError):
        log_in_by_link(service, ended, direct=True, tls=False)


def test_every_session_says_with_which_key_it_began() -> None:
    """`Sessions.begin` has no default for the key, and the authenticator finds sessions through `find` alone."""
    import inspect

    assert inspect.signature(Sessions.begin).parameters["key"].default is inspect.Parameter.empty
    assert "_sessions.find" in inspect.getsource(ServiceAuthenticator.of_session)


# -- every end of a session, by everything that is derived from it -----------------------------------------------------


def by_logging_out(service: Service, key: str, session: dict[str, str]) -> None:
    service.sessions.end(session["Cookie"].partition("=")[2])


def _moved(service: Service, session: dict[str, str], **to: int) -> None:
    """As if time had gone by: the row of a session says other times."""
    found = service.authenticator.of_session(session["Cookie"].partition("=")[2])
    assert found is not None
    table = book_module.service_sessions
    with service.engine.begin() as connection:
        connection.execute(table.update().where(table.c.digest == found.session).values(to))


def by_its_deadline(service: Service, key: str, session: dict[str, str]) -> None:
    _moved(service, session, begun_us=1, expires_us=service.clock.utc_us() - 1)


def by_idling(service: Service, key: str, session: dict[str, str]) -> None:
    """What `used_us` and `expires_us` say once the idle time has gone by."""
    idle_us = service.settings.session_idle_minutes * 60 * MICROSECONDS
    now_us = service.clock.utc_us()
    _moved(service, session, used_us=now_us - idle_us - 1, expires_us=now_us - 1)


SESSION_ENDS: dict[str, Callable[[Service, str, dict[str, str]], None]] = {
    "logout": by_logging_out,
    "its deadline": by_its_deadline,
    "idle too long": by_idling,
    "its key revoked": lambda service, key, _: by_revoking(service, key),
    "its key replaced": lambda service, key, _: by_replacing(service, key),
    "its principal disabled": lambda service, key, _: by_disabling(service, key),
}


@pytest.mark.parametrize("name", SESSION_ENDS)
def test_whatever_ends_a_session_ends_all_that_is_derived_from_it(service: Service, client, people, name: str) -> None:
    """The session, answers held open in it, keys made in it and with those, and sessions begun with these."""
    who = f"derived-{name.replace(' ', '-')}"
    key = people.add(who, Role.AUDITOR)
    session = session_of(client, key)
    caller = service.authenticator.of_session(session["Cookie"].partition("=")[2])
    assert caller is not None
    minted = rotated(client, headers=session)["key"]
    further = rotated(client, minted)["key"]
    second = session_of(client, minted)
    by_minted = service.authenticator.caller(f"Bearer {minted}", None, "127.0.0.1")
    listed = {found.prefix: found for found in service.principals.keys(who)}
    assert listed[prefix_of(minted)].in_session and listed[prefix_of(further)].in_session
    for held in (caller, by_minted):
        service.authenticator.check_still_valid(held)
    assert all(works(client, found) for found in (minted, further)), "control"
    assert works(client, headers=session) and works(client, headers=second), "control"
    SESSION_ENDS[name](service, key, session)
    assert not any(works(client, found) for found in (minted, further))
    assert not works(client, headers=session) and not works(client, headers=second)
    for held in (caller, by_minted):
        with pytest.raises(ProblemError):
            service.authenticator.check_still_valid(held)
    assert rotated(client, minted)["status"] == 401 and rotated(client, headers=second)["status"] == 401
    over = {found.prefix: found for found in service.principals.keys(who)}
    now_us = service.clock.utc_us()
    assert all(
        over[prefix_of(one)].expires_us <= now_us or over[prefix_of(one)].revoked_us for one in (minted, further)
    )


@pytest.mark.parametrize("name", ["logout", "its deadline", "idle too long"])
def test_a_key_that_another_administrator_keeps_outlives_its_session(
    service: Service, client, people, name: str
) -> None:
    """And with its control: without the question, a minted key outlives the session by itself."""
    who = f"outlives-{name.replace(' ', '-')}"
    key = people.add(who, Role.AUDITOR)
    session = session_of(client, key)
    minted = rotated(client, headers=session)["key"]
    other = rotated(client, headers=session)["key"]
    assert kept(client, people["key-custodian"], who, minted) == 200
    SESSION_ENDS[name](service, key, session)
    assert works(client, minted) and not works(client, other)
    assert kept(client, people["key-custodian"], who, other) == 409, "what has ended is kept by nobody"


def test_without_the_question_a_key_made_in_a_session_outlives_it(
    service: Service, client, people, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positive control: the defence off, the attack succeeds."""
    key = people.add("outlived", Role.AUDITOR)
    session = session_of(client, key)
    minted = rotated(client, headers=session)["key"]
    by_logging_out(service, key, session)
    assert not works(client, minted)
    monkeypatch.setattr("kvcustody.governance.service.access.principals.session_end", lambda *_: None)
    assert works(client, minted)


def test_a_key_made_in_a_session_that_a_link_began_ends_with_it(service: Service, client, people) -> None:
    """Such a session has no key: what is made in it names the session alone."""
    people.add("linda", Role.AUDITOR)
    cookie = service.sessions.begin("linda", key="").token
    caller = service.authenticator.of_session(cookie)
    assert caller is not None and not caller.key
    source = service.authenticator.source_of(caller)
    made = service.principals.issue_key("linda", days=1, source=source, by="linda")
    assert works(client, made.key)
    service.sessions.end(cookie)
    assert not works(client, made.key)
