"""API keys and whose they are, and the guard against other web sites that use a visitor's browser to reach an open
local server."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from octavo.api.errors import ApiError
from octavo.cache.policy import ADMIN_TENANT, DEFAULT_TENANT, Policy
from octavo.errors import ConfigError

#: Paths that need no key: liveness, and the page's own files, which ask for the key themselves.
_OPEN_PATHS = frozenset({"/", "/health", "/favicon.ico"})
_OPEN_PREFIX = "/assets/"

#: Paths that show every tenant's numbers. To others than admins they do not exist.
_ADMIN_PATHS = frozenset({"/metrics", "/octavo/cache", "/octavo/cache/events"})

_SCOPE_KEY = "octavo.caller"

_MIN_KEY_LENGTH = 8


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose request it is.

    Attributes:
        tenant: whose pages it may share, and whose limits it has.
        role: an admin sees all tenants' numbers, a tenant its own alone.
    """

    tenant: str
    role: Literal["tenant", "admin"]

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"


#: Whoever reaches a server without keys, and whoever has a key of a server without a policy: one tenant, whose every
#: number is its own.
ONLY_CALLER: Final = Caller(DEFAULT_TENANT, "admin")


def caller_of(request: Request) -> Caller:
    """Whose request it is, on any route that needs a key where there are keys."""
    caller = request.scope[_SCOPE_KEY]
    assert isinstance(caller, Caller)
    return caller


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_SCOPE_KEY] = caller


class ApiKeys:
    """The keys of a key file, kept as SHA-256 digests. Truthy when there is at least one."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self.digests = frozenset(_digest(key) for key in keys)

    @staticmethod
    def from_file(path: Path) -> ApiKeys:
        """One key a line; blank lines and lines that begin with # are skipped. Raises ConfigError."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ConfigError(f"cannot read the API key file {path}: {reason}") from None
        keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError(f"the API key file {path} has no key; write one key a line")
        for number, line in enumerate(lines, 1):
            key = line.strip()
            if key in keys and (len(key) < _MIN_KEY_LENGTH or not key.isascii() or any(c.isspace() for c in key)):
                limits = f"at least {_MIN_KEY_LENGTH} ASCII characters without spaces"
                raise ConfigError(f"{path}, line {number}: a key must have {limits}")
        return ApiKeys(keys)

    def __bool__(self) -> bool:
        return bool(self.digests)

    def __repr__(self) -> str:
        return f"<{len(self.digests)} API keys>"


class KeyRing:
    """Every key that a server knows, and its caller. Truthy when there is at least one.

    With a policy, keys of the key file are those of an ordinary tenant: others' numbers are not theirs to see.
    """

    def __init__(self, file_keys: ApiKeys, policy: Policy | None) -> None:
        owner = ONLY_CALLER if policy is None else Caller(DEFAULT_TENANT, "tenant")
        entries = [(digest, owner) for digest in sorted(file_keys.digests)]
        if policy is not None:
            entries += [(digest, Caller(ADMIN_TENANT, "admin")) for digest in policy.admin_keys]
            for name, tenant in policy.tenants.items():
                entries += [(digest, Caller(name, "tenant")) for digest in tenant.keys]
        self._entries = tuple(entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def find(self, key: str) -> Caller | None:
        """Takes the same time whichever key matches, and whether one does."""
        digest = _digest(key)
        found = [caller for known, caller in self._entries if hmac.compare_digest(digest, known)]
        return found[0] if found else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def needs_key(path: str) -> bool:
    return path not in _OPEN_PATHS and not path.startswith(_OPEN_PREFIX)


def is_for_admins(path: str) -> bool:
    return path in _ADMIN_PATHS


def check_key(headers: Headers, keys: KeyRing) -> Caller:
    """Whose key the request carries, as bearer token or x-api-key. Raises ApiError (401) if it has none that is
    known."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
    if not key:
        message = "this server needs an API key: send it as Authorization: Bearer KEY, or as x-api-key"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    caller = keys.find(key)
    if caller is None:
        raise ApiError(401, "unknown API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return caller


def check_origin(headers: Headers, *, host: str, is_local: bool) -> None:
    """Raises ApiError (403) for a browser request that another web site makes.

    For servers without keys. A browser names the site in Origin; it must be this server. On a loopback
    address the name must also be one that an attacker's DNS cannot give out (a rebound name resolves here and
    looks like ours).
    """
    origin = headers.get("origin")
    if headers.get("sec-fetch-site") == "cross-site" or (origin is not None and not _is_same(origin, headers)):
        raise ApiError(
            403, "requests from other web sites need an API key; start with --api-key-file", code="forbidden"
        )
    if origin is not None and is_local:
        name = urlsplit(origin).hostname or ""
        if name != host and not (name == "localhost" or name.endswith(".localhost") or _is_address(name)):
            message = (
                f"this server does not answer browsers as {name!r}; use http://localhost, or start with --api-key-file"
            )
            raise ApiError(403, message, code="forbidden")


def _is_same(origin: str, headers: Headers) -> bool:
    try:
        return bool(headers.get("host")) and urlsplit(origin).netloc.lower() == headers["host"].lower()
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
