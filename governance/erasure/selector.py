"""The selector of an erasure: a tenant, narrowed by subject or session, by parts of a domain, or by a model.

- A selector names at least one part, and a subject or session only with its tenant.
- A holder is inside when its principal and its own domain match every named part; a domain when its label does.
- `text` is one line that depends on the parts alone; no part of it enters the ledger but by pseudonym.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from kvcustody.errors import ConfigError
from kvcustody.governance.decisions.access_plan import AnyPlan, DomainLabel
from kvcustody.signed_document import encode_ascii


class Selector(NamedTuple):
    """What to erase. `model` is a ModelIdentity's digest; the parts after it select domains."""

    tenant: str | None = None
    subject: str | None = None
    session: str | None = None
    model: bytes | None = None
    classification: str | None = None
    segment: str | None = None
    key_epoch: int | None = None
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> str:
        """`session`, `subject` or `tenant` where nothing else narrows it, otherwise `domain` or `model`."""
        if self.classification or self.segment or self.key_epoch is not None or self.labels:
            return "domain"
        if self.model is not None:
            return "model"
        return "session" if self.session else "subject" if self.subject else "tenant"

    @property
    def ends_keys(self) -> bool:
        """Whether the erasure destroys shred keys: a subject's, or all of a tenant's."""
        return self.subject is not None or self == Selector(tenant=self.tenant)

    @property
    def narrowing(self) -> dict[str, Any]:
        """The parts that name no person, which the ledger may hold in clear."""
        parts: dict[str, Any] = {
            "classification": self.classification,
            "key_epoch": self.key_epoch,
            "labels": dict(self.labels) or None,
            "model": self.model.hex() if self.model is not None else None,
            "segment": self.segment,
        }
        return {name: value for name, value in parts.items() if value is not None}

    def text(self) -> str:
        """Every part in canonical form: a certificate commits to it, and its requester opens it."""
        people = {"session": self.session, "subject": self.subject, "tenant": self.tenant}
        parts = {**{name: value for name, value in people.items() if value is not None}, **self.narrowing}
        return encode_ascii(parts).decode()


def selector_from(text: str) -> Selector:
    """Parse what `Selector.text` wrote; raises `ConfigError` for anything else."""
    try:
        parts = json.loads(text)
        model, labels = parts.pop("model", None), parts.pop("labels", {})
        made = Selector(**parts, model=bytes.fromhex(model) if model else None, labels=tuple(sorted(labels.items())))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise ConfigError("a selector is not one that was written here") from None
    check_selector(made)
    return made


def selector_of(tenant: str | None, subject: str | None, session: str | None, detail: str) -> Selector:
    """Return the selector of a recorded request, with people by name and the other parts from its `detail`."""
    parts = selector_from(detail) if detail not in ("", "{}") else Selector()
    return parts._replace(tenant=tenant, subject=subject, session=session)


def check_selector(selector: Selector) -> None:
    """Raise `ConfigError` for an empty selector or a subject or session without its tenant."""
    if selector == Selector():
        raise ConfigError("an erasure needs a tenant, subject, session, model, or part of a domain")
    if (selector.subject or selector.session) and not selector.tenant:
        raise ConfigError("an erasure by subject or session needs its tenant")


def matches_plan(selector: Selector, plan: AnyPlan) -> bool:
    """Whether a request with this plan is inside the selector."""
    label = plan.own.domain.label
    assert isinstance(label, DomainLabel)
    principal = plan.principal
    return (
        (selector.tenant is None or plan.tenant == selector.tenant)
        and (selector.subject is None or principal.subject == selector.subject)
        and (selector.session is None or principal.session == selector.session)
        and _matches_parts(selector, label)
    )


def matches_label(selector: Selector, label: DomainLabel) -> bool:
    """Whether a whole domain is inside the selector."""
    return (
        (selector.tenant is None or label.tenant == selector.tenant)
        and (selector.subject is None or label.subject == selector.subject)
        and (selector.session is None or label.session == selector.session)
        and _matches_parts(selector, label)
    )


def may_hold(selector: Selector, label: DomainLabel) -> bool:
    """Whether a domain may hold blocks of a writer inside the selector: its own domain, or a wider one."""
    wider = selector._replace(subject=None, session=None)
    return (
        (label.subject is None or selector.subject in (None, label.subject))
        and (label.session is None or selector.session in (None, label.session))
        and (wider == Selector() or matches_label(wider, label))
    )


def _matches_parts(selector: Selector, label: DomainLabel) -> bool:
    spec = label.spec
    return (
        (selector.model is None or (spec is not None and spec.model == selector.model))
        and (selector.classification is None or label.classification == selector.classification)
        and (selector.segment is None or label.grant_or_segment == selector.segment)
        and (selector.key_epoch is None or (spec is not None and spec.key_epoch == selector.key_epoch))
        and (not selector.labels or (spec is not None and set(selector.labels) <= set(spec.labels)))
    )
