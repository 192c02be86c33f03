"""The limit of open files: raised to what the service's connections need, or the service does not start."""

from __future__ import annotations

import resource

from kvcustody.errors import ConfigError
from kvcustody.governance.service.settings import ServiceSettings

_BESIDE = 512  # databases, jobs, logs


def files_needed(settings: ServiceSettings) -> int:
    """Return the number of files a service needs: one a connection, and its own."""
    listeners = 2 if settings.workers_listen else 1
    return listeners * settings.connections_max + _BESIDE


def allow_files(needed: int) -> None:
    """Raise this process's limit of open files; raises `ConfigError` where that is not permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"connections_max: {needed} files are needed, and this process may open {hard}; raise the limit "
            "(`LimitNOFILE=` of systemd, `ulimits.nofile` of Compose, `ulimit -Hn`), or lower `connections_max`",
            needed=needed,
            allowed=hard,
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
