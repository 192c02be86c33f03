"""Envoy's configuration for the door: one listener, the door as external processor, and the routers behind it.

Every bound that has to agree with the door's is derived from the same numbers here: Envoy's buffer, the largest gRPC
message, and the largest body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from kvcustody.http_exchange import host_and_port
from kvcustody.integrations.door.placement_groups import PLACEMENT_HEADER
from kvcustody.policies.document.yaml_nodes import write_values

_TYPE: Final = "type.googleapis.com/envoy."
_HTTP2: Final = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{_TYPE}extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}
MESSAGE_OVERHEAD_BYTES: Final = 64 << 10  # of a gRPC message beyond its body: headers, and what Envoy says of them


class ListenPlace(NamedTuple):
    """An address to listen at."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenPlace:
        """Return an address from HOST:PORT.

        Raises:
            ValueError: the text has another form.
        """
        host, port = host_and_port(text)
        if not port:
            raise ValueError(f"`{text}` names no port")
        return cls(host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class EnvoyTls(NamedTuple):
    """Envoy's own TLS files: for clients, and for a door that requires a certificate."""

    certificate: str
    key: str
    door_ca: str = ""


def envoy_configuration(
    listen: ListenPlace,
    door: ListenPlace,
    router: ListenPlace | Mapping[str, ListenPlace],
    *,
    body_bytes_max: int,
    timeout_seconds: float = 0.2,
    tls: EnvoyTls | None = None,
) -> str:
    """Return the configuration as YAML. `router`: one per placement group, where there are groups.

    `body_bytes_max`: the door's own bound. Envoy buffers more, for a body grows by the namespace that the door writes.

    `timeout_seconds`: how long Envoy waits for one answer of the door, and then refuses the request.
    """
    routers = {} if isinstance(router, ListenPlace) else router
    first = router if isinstance(router, ListenPlace) else next(iter(router.values()))
    clusters = {"router": first} | {f"router-{group}": place for group, place in routers.items()}
    processor = {
        "@type": f"{_TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "kvcustody-door"}, "timeout": "0s"},
        "failure_mode_allow": False,
        "message_timeout": f"{timeout_seconds:g}s",
        "allow_mode_override": False,
        "mutation_rules": {"allow_all_routing": True, "allow_envoy": True},
        "processing_mode": {
            "request_header_mode": "SEND",
            "request_body_mode": "BUFFERED",
            "request_trailer_mode": "SKIP",
            "response_header_mode": "SEND",
            "response_body_mode": "NONE",
            "response_trailer_mode": "SKIP",
        },
    }
    manager = {
        "@type": f"{_TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "kvcustody",
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
        "common_http_protocol_options": {"headers_with_underscores_action": "DROP_HEADER"},
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "router",
                    "domains": ["*"],
                    "routes": _routes(routers),
                }
            ]
        },
        "http_filters": [
            {"name": "kvcustody", "typed_config": processor},
            {
                "name": "router",
                "typed_config": {"@type": f"{_TYPE}extensions.filters.http.router.v3.Router"},
            },
        ],
    }
    chain: dict[str, Any] = {"filters": [{"name": "http", "typed_config": manager}]}
    if tls is not None:
        files = [{"certificate_chain": {"filename": tls.certificate}, "private_key": {"filename": tls.key}}]
        chain["transport_socket"] = {
            "name": "tls",
            "typed_config": {
                "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.DownstreamTlsContext",
                "common_tls_context": {"tls_certificates": files},
            },
        }
    listener = {
        "name": "clients",
        "address": _address(listen),
        "per_connection_buffer_limit_bytes": body_bytes_max + MESSAGE_OVERHEAD_BYTES,
        "filter_chains": [chain],
    }
    return write_values(
        {
            "static_resources": {
                "listeners": [listener],
                "clusters": [
                    _door_cluster(door, tls),
                    *(_cluster(name, at) for name, at in clusters.items()),
                ],
            }
        }
    ).decode()


def _routes(groups: Iterable[str]) -> list[dict[str, Any]]:
    """Return routes by the group that the door chose; unlisted groups get none, and a request without a group gets the
    first.
    """
    routes: list[dict[str, Any]] = []
    for group in groups:
        named = {"headers": [{"name": PLACEMENT_HEADER, "string_match": {"exact": group}}]}
        routes.append(_route(f"router-{group}", named))
    if routes:
        unknown = {"prefix": "/", "headers": [{"name": PLACEMENT_HEADER, "present_match": True}]}
        routes.append({"match": unknown, "direct_response": {"status": 503}})
    return [*routes, _route("router", {})]


def _route(cluster: str, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"match": {"prefix": "/", **more}, "route": {"cluster": cluster, "timeout": "0s"}}


def _door_cluster(door: ListenPlace, tls: EnvoyTls | None) -> dict[str, Any]:
    cluster = _cluster("kvcustody-door", door) | {"typed_extension_protocol_options": _HTTP2}
    if tls is not None and tls.door_ca:
        own = [{"certificate_chain": {"filename": tls.certificate}, "private_key": {"filename": tls.key}}]
        cluster["transport_socket"] = {
            "name": "tls",
            "typed_config": {
                "@type": f"{_TYPE}extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {
                    "tls_certificates": own,
                    "validation_context": {"trusted_ca": {"filename": tls.door_ca}},
                },
            },
        }
    return cluster


def _cluster(name: str, place: ListenPlace) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(place)}}
    return {
        "name": name,
        "connect_timeout": "1s",
        "type": "STRICT_DNS",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _address(place: ListenPlace) -> dict[str, Any]:
    return {"socket_address": {"address": place.host, "port_value": place.port}}
