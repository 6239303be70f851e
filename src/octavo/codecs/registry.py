"""Codecs by name."""

from __future__ import annotations

from octavo.codecs.base import Codec
from octavo.codecs.exact import BF16Codec, F16Codec, F32Codec
from octavo.codecs.int4 import Int4Codec
from octavo.codecs.int8 import Int8Codec
from octavo.errors import ConfigError

_ALL: tuple[Codec, ...] = (F32Codec(), F16Codec(), BF16Codec(), Int8Codec(), Int4Codec())
_CODECS = {codec.name: codec for codec in _ALL}


def codec_names() -> tuple[str, ...]:
    """All names that `get_codec` knows, most bits first."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """Raises ConfigError, listing the names, where there is no such codec."""
    try:
        return _CODECS[name]
    except KeyError:
        raise ConfigError(f"no KV codec is called {name!r}; there are {', '.join(_CODECS)}") from None
