"""An event reads as a sentence with its time, and leads to what it names; custody leads to its evidence."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import httpx
import pytest

from kvcustody.audit.evidence.query.events import EventFilter, every_event
from kvcustody.console.render.event_sentences import sentence_of
from kvcustody.console.render.number_format import relative
from standins.console.page_tables import rows_of
from standins.console.web_world import World

Visitor = Callable[[str], httpx.Client]
LED_TO = re.compile(r'<span class="links">(.*?)</span>', re.DOTALL)


def links(text: str) -> dict[str, str]:
    """The links below an event's sentence: words and address."""
    part = LED_TO.search(text)
    found = [] if part is None else re.findall(r'href="([^"]+)">([^<]+)<', part[1])
    return {html.unescape(words): html.unescape(address) for address, words in found}


def test_every_row_is_the_sentence_of_its_leaf_with_both_times(world: World, visitor: Visitor) -> None:
    page = visitor("auditor").get("/console/audit?tenant=acme&kind=receipt").text
    with world.service.reading() as connection:
        rows = list(every_event(connection, EventFilter(tenant="acme", kinds=("receipt",))))
    shown = rows_of(page, "Events")
    assert len(shown) == min(50, len(rows)) > 0
    said = {sentence_of(row.body) for row in rows}
    for time, kind, sentence, *_ in shown:
        assert kind == "receipt" and any(sentence.startswith(each) for each in said), sentence
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC (now|\d+ (s|min|h|d) ago)", time), time


@pytest.mark.parametrize(
    ("ago_us", "said"),
    [(0, "now"), (999_999, "now"), (1_000_000, "1 s ago"), (-90_000_000, "in 1 min"), (7_200_000_000, "2 h ago")],
)
def test_a_relative_time_has_whole_units(ago_us: int, said: str) -> None:
    assert relative(10**15 - ago_us, 10**15) == said


def test_an_event_leads_to_what_it_names_and_each_link_opens(world: World, visitor: Visitor) -> None:
    world.release()
    auditor = visitor("auditor")
    listed = auditor.get("/console/audit?tenant=acme&kind=residency-opened").text
    place = html.unescape(re.findall(r'href="(/console/audit/event[^"]+)"', listed)[0])
    page = auditor.get(place).text
    found = links(page)
    names = {words.split()[0] for words in found}
    assert names == {"tenant", "its", "request", "block", "revision", "rule", "worker"}, found
    assert found == links(listed.partition(place.partition("&")[2].replace("&", "&amp;"))[2])
    for words, address in found.items():
        answer = auditor.get(address)
        assert answer.status_code == 200 and 'class="empty"' not in answer.text, words
    viewer = visitor("tenant-viewer@acme")
    assert {words.split()[0] for words in links(viewer.get(place).text)} <= {"tenant", "its", "request", "block"}


def test_a_key_leads_to_the_raw_leaf(world: World, visitor: Visitor) -> None:
    auditor = visitor("auditor")
    listed = auditor.get("/console/audit?tenant=acme&kind=receipt").text
    assert "<kbd>r</kbd> the raw leaf" in listed
    place = html.unescape(re.findall(r'href="(/console/audit/event[^"]+)"', listed)[0])
    page = auditor.get(place).text
    assert "<kbd>r</kbd> the raw leaf" in page and '<pre id="leaf" tabindex="-1">{' in page


def test_a_readers_own_page_views_are_one_row(world: World, visitor: Visitor) -> None:
    auditor = visitor("auditor")
    for _ in range(3):
        auditor.get("/console/custody?tenant=acme")
    world.service.writer.flush()
    page = auditor.get("/console/audit").text
    [number] = re.findall(r"<summary>(\d+) page views of yours", page)
    folded = page.partition('<tr class="folded">')[2].partition("</tr>")[0]
    assert folded.count("/console/audit/event") == int(number) >= 3
    assert "auditor read the ledger" not in page.replace(folded, "")
    others = visitor("dpo").get("/console/audit").text
    assert "auditor read the ledger" in others.replace(
        others.partition('<tr class="folded">')[2].partition("</tr>")[0], ""
    ), "control: another reader sees each of them"
    by_kind = auditor.get("/console/audit?kind=access&actor=auditor").text
    assert "page views of yours" not in by_kind and "auditor read the ledger about acme" in by_kind


def test_custody_leads_to_the_subject_the_request_and_its_evidence(world: World, visitor: Visitor) -> None:
    auditor = visitor("auditor")
    page = auditor.get("/console/custody?tenant=acme").text
    row = page.partition('<caption class="hidden">Live residencies<')[2].partition("<tbody>")[2]
    subject, request = (html.unescape(href) for href in re.findall(r'href="([^"]+)"', row)[:2])
    about = auditor.get(subject).text
    assert "The subject whose pseudonym is" in about and rows_of(about, "Residencies of this subject")
    assert ">Erase<" not in about, "an erasure is asked for by name"
    events = rows_of(auditor.get(request).text, "Events")
    assert any("request admitted" in cells[2] for cells in events), events
    [evidence, *_] = re.findall(r'href="([^"]+)">request \d+<', about)
    assert rows_of(auditor.get(html.unescape(evidence)).text, "Events")
    assert visitor("tenant-viewer@labs").get(subject).status_code == 404
