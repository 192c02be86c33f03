"""The control plane that `kvcustody up` and `kvcustody demo fleet` start: ledger, people, policy, console, witness."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcustody.console.command import say
from kvcustody.console.up.running import Progress, go_on, served
from kvcustody.errors import ConfigError
from kvcustody.files import write_file

if TYPE_CHECKING:
    from kvcustody.governance.service.access.roles import Role
    from kvcustody.governance.service.service import Service
    from kvcustody.lab.replay.workload.generator import WorkloadSpec
    from kvcustody.policies.document.model import Policy

HOST = "127.0.0.1"


class RunningPlane(NamedTuple):
    """A running control plane. `listen`: its address; `ledger`: its ledger's database, without a password."""

    service: Service
    folder: Path
    listen: str
    ledger: str

    @property
    def url(self) -> str:
        """The URL of the console and the API."""
        return f"http://{self.listen}"

    @property
    def policy(self) -> Policy:
        """The policy in effect, read anew.

        Raises:
            CustodyError: workers disagree, or its document is not known.
        """
        return self.service.policies_in_effect().the_table(None).policy

    @property
    def link(self) -> str:
        """A new link that signs in whoever opens it, once."""
        from kvcustody.console.web.sign_in import LINK
        from kvcustody.lab.traffic.office import YOU

        return self.url + LINK + self.service.sign_in_links.make(YOU).token

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which commands in another terminal use this control plane, its ledger and its policies.

        They ask it as `you`. `UP` is its folder. A ledger on a server has a password, and is left out.
        """
        from kvcustody.console.up.place import key_file
        from kvcustody.lab.traffic.office import YOU

        local = {"KVCUSTODY_DATABASE_URL": self.ledger} if self.ledger.startswith("sqlite:") else {}
        return {
            "KVCUSTODY_SERVER": self.url,
            "KVCUSTODY_API_KEY_FILE": str(key_file(self.folder, YOU)),
            "KVCUSTODY_POLICY_TRUST": str(self.service.settings.policy_trust),
            "UP": str(self.folder),
            **local,
        }

    def write_environment(self) -> Path:
        """Write the file that sets these variables in a shell, and finds this program; return its path."""
        program = Path(sys.executable).parent
        lines = [f"export {name}={shlex.quote(value)}" for name, value in self.environment.items()]
        path = self.folder / "env.sh"
        write_file(path, "\n".join([*lines, f'export PATH={shlex.quote(str(program))}:"$PATH"', ""]).encode())
        return path

    def as_json(self) -> dict[str, Any]:
        """Return the address and sign-in link as JSON values."""
        from kvcustody.console.up.place import key_file
        from kvcustody.governance.service.access.sign_in_links import LINK_SECONDS
        from kvcustody.lab.traffic.office import PEOPLE

        return {
            "url": f"{self.url}/console/",
            "link": self.link,
            "link_seconds": LINK_SECONDS,
            "folder": str(self.folder),
            "ledger": self.ledger,
            "environment": self.environment,
            "adds": {
                "person": self.adds("NAME", "auditor"),
                "tenant": self.adds("NAME", "tenant-admin", "TENANT"),
            },
            "keys": {name: str(key_file(self.folder, name)) for name in PEOPLE},
            "process": os.getpid(),
        }

    def adds(self, name: str, role: str, tenant: str = "") -> str:
        """Return the command that adds a person, or with `tenant` somebody who acts for one, while this runs.

        It prints the person's key, which signs in at the console. It takes the server from `environment`.
        """
        from kvcustody.console.up.place import key_file
        from kvcustody.lab.traffic.office import BOOTSTRAP

        whose = f" --tenant {tenant}" if tenant else ""
        return f"kvcustody principal add {name} --role {role}{whose} --api-key-file {key_file(self.folder, BOOTSTRAP)}"

    def tell(self) -> None:
        """Print the address and a sign-in link, in two lines."""
        from kvcustody.governance.service.access.sign_in_links import LINK_SECONDS

        say(f"console   {self.url}/console/")
        another = "; Enter prints another" if sys.stdin.isatty() else ""
        say(f"sign in   {self.link}   (once, within {LINK_SECONDS} s, on this machine{another})")

    def tell_link(self) -> None:
        """Print another sign-in link."""
        say(f"sign in   {self.link}", flush=True)


def check_modules(*modules: str) -> None:
    """Refuse to start where a module is missing.

    Raises:
        ConfigError: names the package to install.
    """
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(f"`{module}` is not installed; pip install 'kvcustody[all]'")


def check_port(port: int) -> None:
    """Refuse to start where another program listens on the port; 0 is any free one.

    Raises:
        ConfigError: names the port and the option.
    """
    if not port:
        return
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server binds
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({os.strerror(error.errno or 0).lower()}): "
                "name another with --port, or leave it out for any free one",
                port=port,
            ) from None


def folder_of(stack: ExitStack, folder: Path | None, name: str) -> Path:
    """Return the named folder, or a temporary one that ends with the stack."""
    return folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kvcustody-{name}-")))


def open_plane(
    opened: ExitStack,
    stop: threading.Event,
    progress: Progress,
    folder: Path,
    port: int,
    spec: WorkloadSpec,
    *,
    machines: Mapping[str, frozenset[Role]] | None = None,
    **more: Any,
) -> RunningPlane:
    """Start the control plane in a claimed folder; `opened` ends it. `port` 0: any free port. `more`: service settings.

    Raises `KeyboardInterrupt` where it is told to end.
    """
    from kvcustody.audit.store.database.database_place import database_place
    from kvcustody.audit.tlog.signing_key import read_signing_key
    from kvcustody.console.documents import ConsoleDocuments
    from kvcustody.console.up.place import enrol_people, free_port, plane_settings, release_policy
    from kvcustody.console.up.witness import witnessed
    from kvcustody.governance.service.service import open_service

    place = folder.resolve()
    settings = plane_settings(place, port or free_port(HOST), **more)
    go_on(stop)
    progress("opening the ledger, and its signing key")
    service = opened.enter_context(open_service(settings, documents=ConsoleDocuments()))
    go_on(stop)
    progress("enrolling people, releasing the policy")
    enrol_people(service, place, machines)
    release_policy(service, place, spec)
    go_on(stop)
    progress(f"the control plane serves on {settings.listen}")
    opened.enter_context(served(service, stop))
    ledger = read_signing_key(settings.signing_key_path).verifier
    opened.enter_context(witnessed(service, place / "witness", ledger))
    return RunningPlane(service, place, settings.listen, database_place(str(settings.database_url)).masked())
