"""A prompt as the engine takes it: one array of token ids, made where the request enters and shared from then on."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError

I32 = NDArray[np.int32]

MAX_TOKEN_ID = (1 << 31) - 1


def prompt_array(tokens: Iterable[int] | NDArray[np.integer]) -> I32:
    """Token ids -> int32 [n], contiguous and read-only: a copy, unless `tokens` is such an array already.

    Raises RequestError for what is not a run of integers (no bools, no floats) from 0 to MAX_TOKEN_ID. Whether the
    model has the ids is checked where its vocabulary is known (`engine.admission`).
    """
    if isinstance(tokens, np.ndarray):
        if is_prompt_array(tokens) and tokens.base is None:
            return tokens
        values: NDArray[np.integer] = _checked(tokens)
    else:
        values = _integers(tokens if isinstance(tokens, list | tuple) else list(tokens))
    if values.size and (values.min() < 0 or values.max() > MAX_TOKEN_ID):
        raise _outside(int(values[(values < 0) | (values > MAX_TOKEN_ID)][0]))
    result = np.array(values, dtype=np.int32, order="C")
    result.setflags(write=False)
    return result


def is_prompt_array(value: object) -> TypeGuard[I32]:
    """Whether this is what `prompt_array` returns."""
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.int32
        and value.ndim == 1
        and value.flags.c_contiguous
        and not value.flags.writeable
    )


def _checked(tokens: NDArray[np.integer]) -> NDArray[np.integer]:
    if tokens.ndim != 1:
        raise RequestError(f"a prompt's token ids are one row, got an array of shape {tokens.shape}", param="prompt")
    if tokens.dtype.kind not in "iu" and tokens.size:
        raise _not_an_integer(tokens[0].item())
    return tokens


def _integers(tokens: list[int] | tuple[int, ...]) -> NDArray[np.int64]:
    """int64 [n]. Types are looked at as a set: a long prompt must not cost a Python step per token."""
    others = {kind for kind in set(map(type, tokens)) if kind is not int}
    wrong = tuple(k for k in others if issubclass(k, bool | np.bool_) or not hasattr(k, "__index__"))
    if wrong:
        raise _not_an_integer(next(token for token in tokens if type(token) in wrong))
    try:
        return np.array([operator.index(token) for token in tokens] if others else tokens, dtype=np.int64)
    except TypeError:  # an array of numpy's, say, which has __index__ and cannot always use it
        raise RequestError("a prompt's token ids are integers", param="prompt") from None
    except OverflowError:
        raise _outside(next(token for token in tokens if not 0 <= token <= MAX_TOKEN_ID)) from None


def _not_an_integer(token: object) -> RequestError:
    return RequestError(f"a prompt's token ids are integers, got {token!r:.60}", param="prompt")


def _outside(token: int) -> RequestError:
    message = f"prompt: token id {token} is outside the vocabulary of every model, ids are 0 to {MAX_TOKEN_ID}"
    return RequestError(message[:300], param="prompt")
