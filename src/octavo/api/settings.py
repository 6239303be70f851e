"""Settings of the server, validated once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from octavo.api.auth import ApiKeys
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How the engine is served.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        served_model_names: the names under which the model answers; the first is reported. Empty takes the
            engine's.
        api_keys: keys that clients must send, beside those of the policy; none at all leaves the server open.
        policy_file: the cache contract (docs/policy.md), read at the start and whenever the server is told to.
        max_body_bytes: larger requests are refused.
        body_timeout_s: a request's body must arrive within this time.
        write_timeout_s: a client that takes none of its answer for so long is cut off (where the system can tell).
        keepalive_s: a stream that is silent for so long sends a comment.
        drain_s: at shutdown, streams may go on for so long.
        max_watchers: browsers that may watch the cache at once.
        watch_period_s: time between two looks at the cache for them.
        health_period_s: time between two checks that the engine lives.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: ApiKeys = field(default_factory=ApiKeys)
    policy_file: Path | None = None
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    keepalive_s: float = 15.0
    drain_s: float = 5.0
    max_watchers: int = 32
    watch_period_s: float = 0.4
    health_period_s: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"the port must be 0 to 65535, got {self.port}")
        if self.max_body_bytes < 1024:
            raise ConfigError(f"max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        if any(not name.strip() for name in self.served_model_names):
            raise ConfigError("a served model name cannot be empty")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
