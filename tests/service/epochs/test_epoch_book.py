"""What erasures raise, in what order, when shared names follow, and when a raise is forgotten."""

from __future__ import annotations

import base64
import threading
from typing import Any

import pytest
from sqlalchemy import Engine, select

from kvcustody.audit.evidence.subjects.subject_table import store_names
from kvcustody.audit.kinds import EpochRaised, IssuerAssigned, LogBroken
from kvcustody.audit.leaf.merkle import TreeHead
from kvcustody.audit.store.database.engine import WRITE, open_store
from kvcustody.audit.store.schema.service import erase_epochs
from kvcustody.audit.tlog.log_break import LogBreak, break_record
from kvcustody.audit.tlog.signing_key import SigningKey
from kvcustody.clock import MICROSECONDS, VirtualClock
from kvcustody.governance.edge.erase_epochs import EpochTags, EraseEpochs, KnownEpochs
from kvcustody.governance.erasure.erasure_run import request_event
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.service.epochs.epoch_book import EpochBook
from kvcustody.times import DAY_US
from standins import builders

LOG_KEY = SigningKey.generate("ledger.example/epochs")
KEY, HOUR_US = b"k" * 32, 3600 * MICROSECONDS
ANA = Selector(tenant="acme", subject="ana")


class Desk:
    """A ledger with one issuer, and a book on it."""

    def __init__(self, engine: Engine, folder: Any) -> None:
        self.clock = VirtualClock()
        self.engine = engine
        self.ceiling_us: int | None = HOUR_US
        self.writer = builders.writer(engine, folder / "spill", worker="plane", clock=self.clock)
        self.writer.submit([IssuerAssigned(self.clock.now_us(), "corp", "bare", "plane")])
        assert self.writer.flush()
        self.book = self.made()
        self.asked = 0

    def made(self, key: bytes = KEY, engine: Engine | None = None) -> EpochBook:
        return EpochBook(
            engine or self.engine,
            self.clock,
            key,
            ceiling_us=lambda: self.ceiling_us,
            epoch_minutes=240,
            namespace_days=30,
        )

    def erase(self, selector: Selector, *, seconds: int = 86_400, book: EpochBook | None = None) -> list[EpochRaised]:
        """Raise and record, as the service does."""
        self.asked += 1
        erasure, now_us = f"erasure-{self.asked}", self.clock.now_us()
        deadline_us = now_us + seconds * MICROSECONDS
        made = (book or self.book).raise_for(selector, erasure, deadline_us + self.writer.offset_us, now_us)
        self.writer.submit([*made, request_event(selector, erasure, "dora", deadline_us, now_us)])
        assert self.writer.flush()
        return made  # type: ignore[return-value]

    def batches(self) -> list[EpochRaised]:
        return self.book.raise_batches(self.clock.now_us())  # type: ignore[return-value]

    def known(self, book: EpochBook | None = None) -> KnownEpochs:
        """What somebody who asks for everything is given."""
        book = book or self.book
        page = book.page(after=0)
        made = EraseEpochs(page.raised, version=page.version, floor=page.floor)
        assert made.digest == page.digest
        return KnownEpochs(made, EpochTags(book.key))


@pytest.fixture
def desk(any_store: Any, tmp_path: Any) -> Any:
    made = Desk(any_store, tmp_path)
    yield made
    made.writer.close()


def shape(raised: list[EpochRaised]) -> list[tuple[str, int]]:
    return [(each.scope, each.number) for each in raised]


def test_a_subjects_erasure_raises_the_subject_alone(desk: Desk) -> None:
    assert shape(desk.erase(ANA)) == [("subject", 1)]
    known = desk.known()
    assert known.of("corp", "acme", "ana").private == 1
    assert known.of("corp", "acme", "bob") == known.of("other", "acme", "ana") == (0, 0, 0)
    assert shape(desk.erase(ANA)) == [("subject", 2)]
    assert desk.known().of("corp", "acme", "ana").private == 2


@pytest.mark.parametrize(
    ("selector", "scopes"),
    [
        (Selector(tenant="acme"), ["tenant"]),
        (Selector(tenant="acme", classification="internal"), ["tenant"]),
        (Selector(tenant="acme", subject="ana", session="s1"), ["session", "subject"]),
        (Selector(tenant="acme", session="unseen"), ["tenant"]),
        (Selector(classification="internal"), ["fleet"]),
        (Selector(model=b"m"), ["fleet"]),
    ],
)
def test_what_each_selector_raises(desk: Desk, selector: Selector, scopes: list[str]) -> None:
    assert [each.scope for each in desk.erase(selector)] == scopes


@pytest.mark.parametrize(
    ("subjects", "scopes"),
    [
        (("ana",), ["session", "subject"]),
        (("ana", "bob"), ["session", "subject", "subject"]),
        (("",), ["session"]),
    ],
)
def test_a_session_raises_the_subjects_that_the_ledger_has_for_it(
    desk: Desk, subjects: tuple[str, ...], scopes: list[str]
) -> None:
    rows = [(f"{place:024d}", "acme", one, "s1", None) for place, one in enumerate(subjects)]
    with desk.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        store_names(connection, rows)
    assert [each.scope for each in desk.erase(Selector(tenant="acme", session="s1"))] == scopes
    assert all(desk.known().of("corp", "acme", one).private for one in subjects if one)


def test_a_session_known_by_tags_alone_raises_its_tenant(desk: Desk) -> None:
    """Who is behind a tag, this ledger does not say."""
    with desk.engine.connect().execution_options(**WRITE) as connection, connection.begin():
        store_names(connection, [("0" * 24, "acme", "k1:" + "a" * 40, "s1", None)])
    assert [each.scope for each in desk.erase(Selector(tenant="acme", session="s1"))] == ["tenant"]


def test_a_tenant_of_an_unknown_issuer_raises_the_fleet(any_store: Engine, tmp_path: Any) -> None:
    clock = VirtualClock()
    book = EpochBook(any_store, clock, KEY, ceiling_us=lambda: 0, epoch_minutes=1, namespace_days=1)
    [raised] = book.raise_for(ANA, "erasure", clock.utc_us() + 1, clock.now_us())
    assert isinstance(raised, EpochRaised) and raised.scope == "fleet"


def test_the_shared_name_is_raised_once_for_all_that_wait(desk: Desk) -> None:
    desk.erase(ANA)
    first = desk.batches()
    assert shape(first) == [("shared", 2)] and first[0].tenant == "acme", "none was raised before: at once"
    desk.erase(ANA)
    desk.erase(Selector(tenant="acme", subject="bob"))
    assert desk.batches() == [], "control: the last batch was just now, and the deadlines are far"
    desk.clock.advance(240 * 60 * MICROSECONDS)
    made = desk.batches()
    assert {each.erasure for each in made} == {"erasure-2", "erasure-3"} and {each.number for each in made} == {5}
    assert desk.batches() == []
    assert desk.known().of("corp", "acme").private == 5


def test_the_shared_name_is_raised_before_the_earliest_deadline(desk: Desk) -> None:
    desk.erase(ANA)
    desk.batches()
    desk.erase(ANA, seconds=3600)
    desk.erase(ANA, seconds=600)
    desk.clock.advance(589 * MICROSECONDS)
    assert desk.batches() == [], "control"
    desk.clock.advance(2 * MICROSECONDS)
    assert shape(desk.batches()) == [("shared", 5), ("shared", 5)]


def test_what_a_wider_raise_ended_waits_no_longer_and_is_on_record(desk: Desk) -> None:
    desk.erase(ANA)
    made = desk.erase(Selector(tenant="acme"))
    assert [(each.erasure, each.scope) for each in made] == [("erasure-2", "tenant"), ("erasure-1", "tenant")]
    assert desk.batches() == []
    desk.erase(ANA)
    made = desk.erase(Selector(classification="internal"))
    assert [(each.erasure, each.scope) for each in made] == [("erasure-4", "fleet"), ("erasure-3", "fleet")]


def test_an_erasure_that_was_not_recorded_has_no_leaf(desk: Desk) -> None:
    desk.book.raise_for(ANA, "lost", desk.clock.utc_us() + HOUR_US, desk.clock.now_us())
    assert desk.batches() == []
    assert desk.known().of("corp", "acme").private == 2, "the name ended all the same"


def test_several_processes_give_each_number_once_and_one_batch(desk: Desk) -> None:
    patient = open_store(builders.address_of(desk.engine), timeout_seconds=60)
    books = [desk.made(engine=patient) for _ in range(4)]  # on a loaded machine they wait long for each other
    raised: list[Any] = []
    problems: list[BaseException] = []

    def raise_some(book: EpochBook, place: int) -> None:
        try:
            for number in range(10):
                selector = Selector(tenant="acme", subject=f"{place}-{number}")
                raised.extend(book.raise_for(selector, f"{place}-{number}", 1 << 52, 1))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=raise_some, args=each) for each in zip(books, range(4), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not problems and sorted(each.number for each in raised) == list(range(1, 41))
    together = [threading.Thread(target=book.raise_batches, args=(1,)) for book in books]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(120)
    with desk.engine.connect() as connection:
        kinds = connection.scalars(select(erase_epochs.c.kind).where(erase_epochs.c.kind == "shared")).all()
    assert kinds == ["shared"]
    assert {desk.known(book).epochs.digest for book in books} == {desk.known().epochs.digest}
    patient.dispose()


def test_a_raise_ends_after_ceiling_and_namespace_days_whichever_is_longer(desk: Desk) -> None:
    desk.erase(ANA)
    desk.erase(Selector(tenant="acme", subject="bob"))
    desk.clock.advance(29 * DAY_US)
    assert desk.book.prune() == 0, "control"
    desk.clock.advance(DAY_US + 1)
    desk.ceiling_us = 40 * DAY_US
    assert desk.book.prune() == 0, "a longer ceiling is in effect now"
    desk.ceiling_us = None
    assert desk.book.prune() == 0, "what is in effect is unknown"
    desk.ceiling_us = HOUR_US
    assert desk.book.prune() == 1
    known = desk.known()
    assert (known.epochs.version, known.epochs.floor) == (2, 1), "the newest stays"
    assert known.of("corp", "acme", "ana").private == 0 and known.of("corp", "acme", "bob").private == 2
    assert shape(desk.erase(ANA)) == [("subject", 3)], "no number is given twice"


def test_another_key_raises_the_fleet_once(desk: Desk) -> None:
    desk.erase(ANA)
    before = desk.known().of("corp", "acme", "ana")
    other = desk.made(b"o" * 32)
    after = desk.known(other).of("corp", "acme", "ana")
    assert before.fleet == 0 and after.fleet == 2
    again = desk.known(other)
    assert again.epochs.version == 2, "control: once"
    assert desk.known().epochs.version == 2, "nothing was erased under the other key: the first one has no need to"
    assert [each.scope for each in other.raise_batches(1)] == ["fleet", "fleet"], "on record, and who waited"
    desk.erase(ANA)
    assert desk.known(other).of("corp", "acme", "bob").fleet == 4


def test_a_break_on_record_raises_the_fleet_once_when_the_service_starts(desk: Desk) -> None:
    """As it is put on record while the service is stopped."""
    desk.erase(ANA)
    assert desk.known(desk.made()).of("corp", "acme", "bob").fleet == 0, "control"
    desk.clock.advance(MICROSECONDS)
    head, at_seconds = TreeHead(1, bytes(32)), desk.clock.utc_us() // MICROSECONDS
    statement = break_record(LOG_KEY, LogBreak(LOG_KEY.name, head, head, head, 0, at_seconds))
    record = base64.b64encode(statement).decode()
    desk.writer.submit_durable(LogBroken(desk.clock.now_us(), 1, 1, record, "ops", "restored"))
    restarted = desk.made()
    found = desk.known(restarted).of("corp", "acme", "bob").fleet
    assert found > desk.clock.utc_us() - MICROSECONDS
    assert [each.scope for each in restarted.raise_batches(1)] == ["fleet", "fleet"], "on record, and who waited"
    assert desk.known(desk.made()).of("corp", "acme", "bob").fleet == found, "once"


def test_pages_give_the_same_snapshot(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcustody.governance.service.epochs.epoch_book.PAGE_RAISES", 3)
    for number in range(8):
        desk.erase(Selector(tenant="acme", subject=str(number)))
    epochs, pages = EraseEpochs(), 0
    while True:
        page, pages = desk.book.page(after=epochs.version), pages + 1
        epochs = epochs.extended(page.raised, version=page.version, floor=page.floor)
        if page.digest:
            break
    assert pages == 3 and epochs.digest == page.digest and len(epochs) == 8


def test_who_lacks_the_newest_and_since_when(desk: Desk) -> None:
    desk.book.takers.heard("door-1", "door", 0)
    assert [each.state for each in desk.book.takers.listed()] == ["current"]
    raised_us = desk.clock.utc_us()
    desk.erase(ANA)
    desk.clock.advance(7 * MICROSECONDS)
    desk.book.takers.heard("door-1", "door", 0)
    desk.book.takers.heard("gpu-0", "worker", 1)
    behind, current = desk.book.takers.listed()
    assert (behind.name, behind.state, behind.behind_since_us) == ("door-1", "behind", raised_us)
    assert (current.name, current.state, current.behind_since_us) == ("gpu-0", "current", None)
    assert (behind.since_us, current.since_us) == (raised_us, behind.heard_us), "since it acts by its version"
    desk.clock.advance(6 * MICROSECONDS)
    desk.book.takers.heard("gpu-0", "worker", 1)
    [_, heard] = desk.book.takers.listed()
    assert heard.since_us == current.since_us < heard.heard_us
    desk.clock.advance(61 * MICROSECONDS)
    assert [each.state for each in desk.book.takers.listed()] == [
        "silent",
        "silent",
    ]


def test_no_row_names_anybody(desk: Desk) -> None:
    desk.erase(Selector(tenant="acme", subject="ana", session="s1"))
    with desk.engine.connect() as connection:
        rows = connection.execute(select(erase_epochs)).all()
    text = b"|".join(
        bytes(value) if isinstance(value, (bytes, memoryview)) else str(value).encode() for row in rows for value in row
    )
    assert not any(name in text for name in (b"ana", b"s1", b"acme"))
