"""Errors that a user meets. Each carries a message that suffices alone: what was asked, the limit, what would work."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""


class ConfigError(OctavoError):
    """A setting is impossible, alone or with the others; the message names the nearest one that works."""


class LoadError(OctavoError):
    """A model cannot be found, fetched, verified or read."""


class UnsupportedError(LoadError):
    """The model is readable but needs something that Octavo does not have yet (an architecture, a tensor type)."""


class RequestError(OctavoError):
    """A request is invalid or can never be served.

    `code` and `param` follow OpenAI's error object: `param` is the offending field, `code` a stable identifier such
    as "context_length_exceeded" or "invalid_value".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OverloadedError(OctavoError):
    """The engine cannot take the request now; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(OctavoError):
    """The engine was closed, or its thread has died, before the request was done."""


class CloseTimeout(OctavoError):
    """The engine did not end within the time that closing it may take; its memory is given back when it does."""


class CodecRangeError(OctavoError):
    """A value cannot be stored by the codec (NaN, infinity, or a scale beyond its format's range)."""


class IntegrityError(OctavoError):
    """Bytes of a page are not those that were written: their checksum differs."""


class OutOfPages(OctavoError):
    """The page budget is spent and nothing can be evicted. The scheduler answers by preempting; users never see it.

    `tenant` is set where it is not the budget but a tenant's cap that is reached.
    """

    def __init__(self, message: str, *, tenant: str | None = None) -> None:
        super().__init__(message)
        self.tenant = tenant
