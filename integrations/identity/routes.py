"""The paths of an engine's HTTP server that tenants may use, and how each carries a scope token; vLLM's by default.

A route is refused to tenants unless it is listed here or in the identity document, or is open. So development and
administration endpoints, and whatever a later version adds, are refused. Audio uploads and websockets are refused too,
because they have no field for a token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Final, NamedTuple


class Body(Enum):
    """The shape of a request body, which determines the number of its engine requests."""

    COMPLETION = auto()
    CHAT = auto()
    CHAT_BATCH = auto()
    RESPONSES = auto()
    MESSAGES = auto()
    GENERATE = auto()
    SGLANG_GENERATE = auto()
    POOLING = auto()
    SCORING = auto()


class Room(Enum):
    """The place in a request body for the door's other hints, if there is one."""

    NONE = auto()
    TRANSFER = auto()  # `kv_transfer_params`, where a long token fits too
    CUSTOM = auto()  # `custom_params`
    SAMPLING = auto()  # `sampling_params.custom_params`


class Scoped(NamedTuple):
    """A path whose requests reach the engine: its body carries a token."""

    body: Body
    room: Room


SCOPED: Final = {
    "/v1/completions": Scoped(Body.COMPLETION, Room.TRANSFER),
    "/v1/chat/completions": Scoped(Body.CHAT, Room.TRANSFER),
    "/v1/chat/completions/batch": Scoped(Body.CHAT_BATCH, Room.NONE),
    "/v1/responses": Scoped(Body.RESPONSES, Room.TRANSFER),
    "/v1/messages": Scoped(Body.MESSAGES, Room.TRANSFER),
    "/inference/v1/generate": Scoped(Body.GENERATE, Room.TRANSFER),
    "/v1/embeddings": Scoped(Body.POOLING, Room.NONE),
    "/pooling": Scoped(Body.POOLING, Room.NONE),
    "/classify": Scoped(Body.POOLING, Room.NONE),
    "/score": Scoped(Body.SCORING, Room.NONE),
    "/v1/score": Scoped(Body.SCORING, Room.NONE),
    "/rerank": Scoped(Body.SCORING, Room.NONE),
    "/v1/rerank": Scoped(Body.SCORING, Room.NONE),
    "/v2/rerank": Scoped(Body.SCORING, Room.NONE),
    "/generative_scoring": Scoped(Body.SCORING, Room.NONE),
}
# Paths that need identity and reach no engine block.
PLAIN: Final = frozenset({"/v1/models", "/tokenize", "/detokenize", "/v1/messages/count_tokens"})


class EngineServer(NamedTuple):
    """The facts about an engine's HTTP server that the gate needs.

    whole_tokens: a token of any length fits in `cache_salt`. refused_fields: fields of bodies that are not accepted
    from tenants. id_fields: ids that the client chose, bound to their owner besides those that are everywhere.
    prefix_requests: several samples of a prompt begin with one more request, for what they share.
    """

    scoped: Mapping[str, Scoped]
    whole_tokens: bool = False
    refused_fields: tuple[str, ...] = ()
    id_fields: tuple[str, ...] = ()
    prefix_requests: bool = False


VLLM_SERVER: Final = EngineServer(SCOPED)
# Paths that name a stored response: only its owner may.
STORED_RESPONSE: Final = re.compile(r"/v1/responses/([^/]+)(?:/cancel)?")


def route_path(scope_path: str, root_path: str) -> str:
    """Return the path by which the server routes: without the prefix under which it is mounted."""
    if not root_path or not scope_path.startswith(root_path):
        return scope_path
    rest = scope_path[len(root_path) :]
    return rest if rest.startswith("/") or not rest else scope_path
