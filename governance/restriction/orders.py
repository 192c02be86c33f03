"""From recorded restrictions to what a worker follows, and what is refused while one is in force.

Pseudonyms become names here, where the directory and the keys of subjects are. A restriction whose subject nobody can
name is no order: it is said aloud, and the case says that nobody follows it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection

from kvcustody.audit.evidence.cases.restrictions import restrictions_in_force
from kvcustody.audit.evidence.subjects.subject_key_store import SubjectKeys
from kvcustody.audit.evidence.subjects.subject_table import subject_behind
from kvcustody.errors import ConfigError
from kvcustody.governance.erasure.selector import Selector
from kvcustody.governance.restriction.restricted_subjects import RestrictedSubject, RestrictedSubjects
from kvcustody.logger import get_logger

_log = get_logger(__name__)


def restricted_now(connection: Connection, keys: SubjectKeys | None = None) -> RestrictedSubjects:
    """Return the restrictions in force in the ledger, by name."""
    subjects = []
    for one in restrictions_in_force(connection):
        name = None if one.subject is None else subject_behind(connection, one.subject, keys)
        if name is None:
            _log.error("a restriction's subject cannot be named", case=one.case_id)
        else:
            subjects.append(RestrictedSubject(one.case_id, one.tenant, name))
    return RestrictedSubjects(subjects)


def restricted_from(items: Iterable[dict[str, str]]) -> RestrictedSubjects:
    """Return the restrictions that a control plane sent."""
    return RestrictedSubjects(RestrictedSubject(item["case_id"], item["tenant"], item["subject"]) for item in items)


def check_not_restricted(connection: Connection, selector: Selector, keys: SubjectKeys | None = None) -> None:
    """Raise `ConfigError` where an erasure covers what a restriction preserves, even of subjects that can no longer be
    named.
    """
    restricted_now(connection, keys).check_erasable(selector.tenant, selector.subject, selector.session)
    for one in restrictions_in_force(connection):
        if selector.subject is None and selector.tenant in (None, one.tenant):
            raise ConfigError(f"case `{one.case_id}` restricts the processing of a subject of this tenant")
