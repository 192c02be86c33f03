"""Where an event leads: pages of what its leaf names, for those who may open them.

    links_of(visit, body, workers)      # [Link("tenant acme", "/console/audit?tenant=acme"), …]

A leaf of several events leads to what its first few name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple
from urllib.parse import urlencode

from kvcustody.audit.kinds.block_runs import decode_flat
from kvcustody.audit.leaf.change_items import plain_bodies
from kvcustody.console.render.number_format import short
from kvcustody.console.web.page_request import PREFIX, PageRequest
from kvcustody.governance.service.access.roles import Permission, Reach
from kvcustody.plurals import several

Body = Mapping[str, Any]
_ITEMS_MAX = 3


class Link(NamedTuple):
    """A link: its words, and its address within this service."""

    words: str
    address: str


def links_of(visit: PageRequest, body: Body, workers: Mapping[str, str]) -> list[Link]:
    """Return where a leaf leads: tenant, subject, request, block, revision, rule, erasure, case, worker.

    Args:
        visit: Who looks: what this person may not open is left out.
        body: The leaf.
        workers: The name of the worker of each incarnation.

    Returns:
        Each address once, the tenant first.
    """
    links: dict[str, str] = {}
    for item in islice(plain_bodies(body), _ITEMS_MAX):
        for link in _links(visit, {**body, **item}, workers):
            links.setdefault(link.address, link.words)
    return [Link(words, address) for address, words in links.items()]


def residency_page(incarnation: str, residency: int) -> str:
    """Return the address of everything on record about one request."""
    return _page("/audit", incarnation=incarnation, residency=residency)


def subject_page(tenant: str, pseudonym: str) -> str:
    """Return the address of what is on record under a subject's pseudonym."""
    return _page("/custody/subject", tenant=tenant, pseudonym=pseudonym)


def _links(visit: PageRequest, body: Body, workers: Mapping[str, str]) -> Iterator[Link]:
    tenant, life = body.get("tenant") or body.get("of_tenant"), str(body["incarnation"])
    revision, sees_policy = int(body.get("revision") or 0), visit.may(Permission.READ_POLICY)
    if tenant:
        yield Link(f"tenant {tenant}", _page("/audit", tenant=tenant))
    if tenant and body.get("subject"):
        yield Link("its subject", subject_page(str(tenant), str(body["subject"])))
    if body.get("residency"):
        yield Link(f"request {body['residency']}", residency_page(life, int(body["residency"])))
    yield from _blocks(body, life)
    if revision and sees_policy:
        yield Link(f"revision {revision}", f"{PREFIX}/policy/{revision}")
        for rule in [body["rule"]] if body.get("rule") else body.get("reasons") or ():
            yield Link(f"rule {rule}", _page("/decisions/rule", id=rule, revision=revision))
    if body.get("erasure"):
        yield Link(f"erasure {short(str(body['erasure']))}", f"{PREFIX}/erasures/{body['erasure']}")
    if body.get("case_id"):
        yield Link(f"case {short(str(body['case_id']))}", f"{PREFIX}/cases/{body['case_id']}")
    of_life = str(body.get("of_incarnation") or life)
    if of_life in workers:
        yield Link(f"worker {workers[of_life]}", _page("/audit", incarnation=of_life))


def _blocks(body: Body, life: str) -> Iterator[Link]:
    """Yield a link to the history of the leaf's first block."""
    runs = [*(body.get("runs") or ()), *(body.get("written") or ())]
    if not runs:
        return
    pairs, lengths = decode_flat(runs[:1])
    if not int(lengths.sum()):
        return
    block, generation, pool = (int(column[0]) for column in (pairs.blocks, pairs.generations, pairs.pools))
    if block < 0:  # the leaf names it by its generation alone
        yield Link("its first block", _page("/audit", incarnation=life, generation=generation))
        return
    name = f"{life}:{block}:{generation}" + (f":{pool}" if pool else "")
    number = int(body.get("blocks") or 0)
    more = f", the first of {several(number, 'block')}" if number > 1 else ""
    yield Link(f"block {block}{more}", _page("/audit", block=name))


def workers_of(visit: PageRequest) -> dict[str, str]:
    """Return the worker of each incarnation; none for who sees one tenant alone."""
    if visit.caller.reach(Permission.READ_CUSTODY) is not Reach.ALL:
        return {}
    return {life: period.worker for life, period in visit.service.work_periods().items()}


def _page(path: str, **query: object) -> str:
    return f"{PREFIX}{path}?{urlencode(query)}"
