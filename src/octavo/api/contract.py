"""The policy in force: read at the start, replaced as a whole, seen by each caller as far as it concerns it."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from octavo.api.auth import KeyRing
from octavo.api.settings import ServerSettings
from octavo.cache.policy import Policy
from octavo.cache.policy_file import Surroundings, parse_policy, read_policy_text
from octavo.engine.client import EngineInfo
from octavo.errors import ConfigError, OctavoError

log = logging.getLogger("octavo.policy")


@dataclass(frozen=True, slots=True)
class InForce:
    """One policy, and what follows from it.

    Attributes:
        keys: who may come in; falsy when anybody may.
        version: hash of the whole file; empty without one.
        loaded_at: Unix time in seconds.
    """

    policy: Policy
    keys: KeyRing
    version: str
    loaded_at: float


class Contract:
    """Holds the policy in force. `now` may be read from any thread; a request reads it once."""

    def __init__(self, settings: ServerSettings, info: EngineInfo) -> None:
        """Raises ConfigError when there is a policy file and it is not valid for this engine."""
        self._settings = settings
        self._around = Surroundings(
            key_codec=info.key_codec,
            value_codec=info.value_codec,
            budget_bytes=info.kv_memory_bytes,
            other_keys=settings.api_keys.digests,
        )
        self._reloading = threading.Lock()
        self._listeners: list[Callable[[Policy], None]] = []
        self.now = self._read()

    @property
    def path(self) -> Path | None:
        """The policy file; None: the server's own default, which never changes."""
        return self._settings.policy_file

    def on_change(self, listener: Callable[[Policy], None]) -> None:
        """Call `listener` with each policy that comes into force from now on, on the thread that reloads."""
        self._listeners.append(listener)

    def reload(self) -> bool:
        """Read the file again and put it in force as a whole. Whatever is wrong with it is logged, the old policy
        stays, and the answer is False."""
        with self._reloading:
            try:
                new = self._read()
                if self.now.keys and not new.keys:
                    message = f"{self.path}: without any key it would open the server to everybody; restart to do that"
                    raise ConfigError(message)
            except OctavoError as error:
                log.error("the policy stays as it was: %s", error)
                return False
            except Exception as error:  # noqa: BLE001 - a reload must not end the server, whatever it meets
                log.error("the policy stays as it was: unexpected %s while reading it", type(error).__name__)
                return False
            self.now = new
            log.info("policy %s is in force", new.version)
            for listener in self._listeners:
                try:
                    listener(new.policy)
                except Exception as error:  # noqa: BLE001 - the others must hear of it still
                    log.error("unexpected %s in what follows a new policy", type(error).__name__)
            return True

    def _read(self) -> InForce:
        keys, around = self._settings.api_keys, self._around
        if self.path is None:
            policy = Policy(key_codec=around.key_codec or "", value_codec=around.value_codec or "")
            return InForce(policy, KeyRing(keys, None), "", time.time())
        text = read_policy_text(self.path)
        policy = parse_policy(text, str(self.path), around)
        return InForce(policy, KeyRing(keys, policy), content_hash(text), time.time())


def content_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
