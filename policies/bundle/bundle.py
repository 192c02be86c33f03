"""A policy bundle: one policy revision and the signatures that authorize it.

1. What is signed is the manifest: audience, revision, policy digest, digest of the document's bytes, times and
   revoked ids. The document is bound by its digests.
2. The trust configuration says which signatures a bundle needs; nothing in a bundle says so. A signature by a key
   that it does not name refuses the bundle, so there is no byte of a bundle that may change.
3. A bundle is for one audience, from `issued_us` until `expires_us`, and never replaces a higher revision.
4. Reading is bounded, canonical (`signed_document`) and total: whatever is wrong is one `DocumentRejected`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

from kvcustody.policies.bundle.manifest import SCHEMA, BundleManifest, read_manifest
from kvcustody.policies.bundle.trust import Signer, Trust
from kvcustody.policies.document.digest import digest as policy_digest
from kvcustody.policies.document.model import Policy
from kvcustody.policies.reading.load_policy import load_policy
from kvcustody.signed_document import (
    DocumentRejected,
    DocumentSignature,
    check_signature,
    decode,
    digest,
    encode,
    read_signature,
)

BUNDLE_BYTES_MAX = 4 << 20
SIGNATURES_MAX = 8
SKEW_US = 300 * 1_000_000
"""How far another machine's clock may be ahead before what it issued counts as future-dated."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """A manifest, the document's text, and the signatures on the manifest."""

    manifest: BundleManifest
    document: str
    signatures: tuple[DocumentSignature, ...]


@dataclass(frozen=True, slots=True)
class VerifiedBundle:
    """A bundle that the trust configuration accepts, with its policy. Only `verify` makes one."""

    bundle: Bundle
    policy: Policy
    signers: tuple[str, ...]


def manifest_of(
    document: str,
    *,
    audience: str,
    revision: int,
    issued_us: int,
    expires_us: int,
    revoked: Iterable[str] = (),
    file: str = "policy",
) -> tuple[BundleManifest, Policy]:
    """Return the manifest and the policy of a document. Raises `PolicyRejected` if the document is not a policy."""
    policy = load_policy(document, name=file)
    manifest = BundleManifest(
        audience,
        policy.name,
        revision,
        policy_digest(policy),
        digest(document.encode()),
        issued_us,
        expires_us,
        tuple(sorted(set(revoked))),
    )
    return read_manifest(manifest.form()), policy


def sign_manifest(manifest: BundleManifest, signer: Signer) -> DocumentSignature:
    """Sign a manifest and return the signature."""
    return DocumentSignature(signer.name, signer.sign(manifest.message()))


def write_bundle(bundle: Bundle) -> bytes:
    """Return the bytes of a bundle in the form in which it is stored and sent."""
    signatures = [signature.form() for signature in sorted(bundle.signatures)]
    form = {
        "document": bundle.document,
        "manifest": bundle.manifest.form(),
        "schema": SCHEMA,
        "signatures": signatures,
    }
    return encode(form)


def read_bundle(data: bytes) -> Bundle:
    """Return the bundle in `data` without verifying it; raises `DocumentRejected`."""
    form = decode(data, "bundle", BUNDLE_BYTES_MAX)
    if form.get("schema") != SCHEMA or set(form) != {"document", "manifest", "schema", "signatures"}:
        raise DocumentRejected(f"bundle is not a `{SCHEMA}`")
    listed = form["signatures"]
    if not isinstance(form["document"], str) or not isinstance(listed, list) or len(listed) > SIGNATURES_MAX:
        raise DocumentRejected("bundle has no document, or too many signatures")
    signatures = tuple(read_signature(item) for item in listed)
    if list(signatures) != sorted(set(signatures)):
        raise DocumentRejected("bundle lists its signatures out of order, or one twice")
    return Bundle(read_manifest(form["manifest"]), form["document"], signatures)


def verify(data: bytes, trust: Trust, *, now_utc_us: int, revision_min: int = 0) -> VerifiedBundle:
    """Return the policy of a bundle that `trust` accepts now; raises `DocumentRejected` with the reason.

    `revision_min`: the highest revision that was in effect here, restarts included (`governance.release.mark`).
    """
    bundle = read_bundle(data)
    signers = check_signatures(bundle, trust)
    policy = check_document(bundle.manifest, bundle.document)
    check_current(bundle.manifest, trust, now_utc_us=now_utc_us, revision_min=revision_min)
    return VerifiedBundle(bundle, policy, signers)


def check_signatures(bundle: Bundle, trust: Trust) -> tuple[str, ...]:
    """Return the names of the signers, one for each role that the trust configuration requires; else
    `DocumentRejected`.
    """
    message = bundle.manifest.message()
    keys = [check_signature(trust.keys, signature, message, "bundle") for signature in bundle.signatures]
    if len({key.public for key in keys}) != len(keys):
        raise DocumentRejected("bundle is signed twice by one key")
    for role in trust.needs:
        if not any(role in key.roles for key in keys):
            raise DocumentRejected(
                f"bundle has no signature of an {role.value}; the trust configuration needs one", role=role
            )
    if not any(
        all(role in key.roles for role, key in zip(trust.needs, each, strict=True))
        for each in permutations(keys, len(trust.needs))
    ):
        raise DocumentRejected(f"bundle is not signed by {len(trust.needs)} people, one for each required role")
    return tuple(key.name for key in keys)


def check_document(manifest: BundleManifest, document: str) -> Policy:
    """Return the policy in the document that the manifest binds; raises `DocumentRejected` or `PolicyRejected`."""
    try:
        actual_digest = digest(document.encode())
    except UnicodeEncodeError:
        actual_digest = ""
    if actual_digest != manifest.document:
        raise DocumentRejected(f"bundle of revision `{manifest.revision}` holds another document than was signed")
    policy, actual_digest = _read_document(document, f"{manifest.name}@{manifest.revision}")
    if (policy.name, actual_digest) != (manifest.name, manifest.digest):
        raise DocumentRejected(
            f"bundle of revision `{manifest.revision}`: this program reads another policy in the document than the "
            f"`{manifest.digest}` that was signed"
        )
    return policy


@lru_cache(maxsize=64)
def _read_document(document: str, name: str) -> tuple[Policy, str]:
    """Return a policy and its digest. Cached, because every step of a release reads it again and its documents never
    change.
    """
    policy = load_policy(document, name=name)
    return policy, policy_digest(policy)


def check_current(manifest: BundleManifest, trust: Trust, *, now_utc_us: int, revision_min: int) -> None:
    """Raise `DocumentRejected` unless the manifest is for this audience, in force now, and not older than the last
    one.
    """
    if manifest.audience != trust.audience:
        raise DocumentRejected(
            f"bundle is for `{manifest.audience}`, this deployment is `{trust.audience}`",
            audience=manifest.audience,
        )
    if manifest.revision < revision_min:
        raise DocumentRejected(
            f"bundle has revision `{manifest.revision}`, but `{revision_min}` was in effect here already; "
            "roll back by releasing the old content under a new revision",
            revision=manifest.revision,
            revision_min=revision_min,
        )
    if manifest.issued_us > now_utc_us + SKEW_US:
        raise DocumentRejected(f"bundle of revision `{manifest.revision}` is issued in the future; check the clock")
    if now_utc_us >= manifest.expires_us:
        raise DocumentRejected(f"bundle of revision `{manifest.revision}` has expired; release it anew")
