"""Graph captures and custody's work on a device exclude each other, in one process.

    with capturing():           # around an engine's capture of a graph
    with outside_captures():    # around a scrub, a copy, a wait, from whatever thread

A scrub put on a stream that is being captured is recorded instead of done, and repeats at each replay; an event or a
wait that touches one breaks the capture; a wait for the whole device is refused while there is one. So whoever comes
second waits, on the host, until the first has finished: captures are rare and custody's turns are short.

- Both are re-entrant in one thread: an engine that captures does no custody in between.
- A capture that nobody announces is not seen here; `OrderedScrub.launch` refuses the one of its own current stream.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_turn = threading.RLock()


def outside_captures() -> AbstractContextManager[bool]:
    """No announced capture runs meanwhile."""
    return _turn


@contextmanager
def capturing() -> Iterator[None]:
    """An engine records a graph: custody puts nothing on a device meanwhile."""
    with _turn:
        yield
