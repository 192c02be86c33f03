"""Delivers open tasks to a webhook and by mail, each once.

1. An item is delivered when it is first seen, and again when it becomes overdue. What was delivered is kept in the
   service's folder, so that a restart repeats nothing; what a receiver did not take is offered again at the next turn.
2. A delivery that fails costs nothing else: no request, no record and no other receiver waits for it.
3. Texts name tenants, principals and revisions. No key, password or address of a receiver is logged.
"""

from __future__ import annotations

import json
import smtplib
import ssl
import threading
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from pathlib import Path

import orjson

from kvcustody.audit.siem.sink import SinkError, WebhookSink
from kvcustody.errors import ConfigError
from kvcustody.files import write_file
from kvcustody.governance.service.inbox.item import InboxItem
from kvcustody.governance.service.settings import InboxMail, InboxWebhook, ServiceSettings
from kvcustody.guarding_thread import GuardingThread
from kvcustody.logger import get_logger
from kvcustody.signed_document import digest
from kvcustody.times import readable

_log = get_logger(__name__)
_FILE = "inbox-delivered.json"
_SECONDS = 10.0  # of a mail server's answer
_END_SECONDS = 15.0
Deliver = Callable[[Sequence[InboxItem]], None]


class InboxDelivery:
    """Delivers on its own thread where the settings name a receiver. Close it before the ledger."""

    def __init__(self, settings: ServiceSettings, folder: Path, read: Callable[[], tuple[InboxItem, ...]]) -> None:
        self._read = read
        self._seconds = settings.inbox_seconds
        self._file = folder / _FILE
        self._receivers: dict[str, Deliver] = {}
        if settings.inbox_webhook is not None:
            self._receivers["webhook"] = _webhook(settings.inbox_webhook)
        if settings.inbox_mail is not None:
            self._receivers["mail"] = _mail(settings.inbox_mail, settings.ledger_origin)
        self._told: dict[str, set[str]] = {name: set() for name in self._receivers}
        self._stop = threading.Event()
        self._thread = GuardingThread(self._run, name="kvcustody-inbox")
        if self._receivers:
            self._load()
            self._thread.start()

    def close(self) -> None:
        """Stop delivering; a second call changes nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def deliver_once(self) -> None:
        """Offer every receiver the tasks that it has not received (rule 1)."""
        items = self._read()
        names = {_name(item): item for item in items}
        for receiver, deliver in self._receivers.items():
            told_before = self._told[receiver] & names.keys()  # what is gone may come again
            fresh = [item for name, item in names.items() if name not in told_before]
            if fresh:
                try:
                    deliver(fresh)
                except (SinkError, OSError, smtplib.SMTPException) as error:
                    _log.warning("inbox not delivered", receiver=receiver, reason=type(error).__name__)
                    fresh = []
            self._told[receiver] = told_before | {_name(item) for item in fresh}
        self._keep()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            try:
                self.deliver_once()
            except Exception:
                _log.error("the inbox cannot be read", exc_info=True)

    def _load(self) -> None:
        try:
            kept = json.loads(self._file.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("the list of delivered items cannot be read", reason=type(error).__name__)
            return
        for receiver in self._receivers:
            self._told[receiver] = set(map(str, kept.get(receiver, ())))

    def _keep(self) -> None:
        data = orjson.dumps({name: sorted(told) for name, told in self._told.items()})
        if not self._file.exists() or self._file.read_bytes() != data:
            write_file(self._file, data)


def _name(item: InboxItem) -> str:
    return f"{item.id} {item.state}"


def _webhook(where: InboxWebhook) -> Deliver:
    """Posts items as one JSON document; its id is of what it says, so a repetition is known as one."""
    sink = WebhookSink("inbox", where.url, _secret(where.key_path, "inbox webhook"), content_type="application/json")

    def deliver(items: Sequence[InboxItem]) -> None:
        body = orjson.dumps({"schema": "kvcustody/inbox@1", "items": [item.data() for item in items]})
        sink.deliver(f"inbox-{digest(body).partition(':')[2][:32]}", body)

    return deliver


def _mail(where: InboxMail, ledger: str) -> Deliver:
    """Mails items, the most urgent first."""
    password = None if where.password_path is None else _secret(where.password_path, "inbox mail")

    def deliver(items: Sequence[InboxItem]) -> None:
        host, _, port = where.server.rpartition(":")
        context = ssl.create_default_context()
        server = (
            smtplib.SMTP_SSL(host.strip("[]"), int(port), timeout=_SECONDS, context=context)
            if where.tls == "tls"
            else smtplib.SMTP(host.strip("[]"), int(port), timeout=_SECONDS)
        )
        with server:
            if where.tls == "starttls":
                server.starttls(context=context)
            if password is not None:
                server.login(where.user, password.decode())
            server.send_message(_letter(where, ledger, items))

    return deliver


def _letter(where: InboxMail, ledger: str, items: Sequence[InboxItem]) -> EmailMessage:
    letter = EmailMessage()
    overdue = sum(item.state == "overdue" for item in items)
    more = f", {overdue} overdue" if overdue else ""
    letter["Subject"] = f"kvcustody: {len(items)} wait{'s' if len(items) == 1 else ''} for somebody{more}"
    letter["From"], letter["To"] = where.sender, ", ".join(where.to)
    lines = [f"In the ledger {ledger}:", ""]
    for item in items:
        until = "" if item.due_us is None else f" (until {readable(item.due_us)} UTC)"
        lines += [f"{item.state}: {item.text}{until}", f"    {item.command}", f"    /console{item.page}", ""]
    letter.set_content("\n".join(lines))
    return letter


def _secret(path: Path, what: str) -> bytes:
    """What a file of mode 0600 holds; raises `ConfigError`."""
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{what}: `{path}` is open to others; chmod 600 it", path=path)
        return path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{what}: `{path}`: {error.strerror}", path=path) from None
