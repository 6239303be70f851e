"""Token ids become one read-only array, and only integers do."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from octavo.engine.messages import GenerateRequest, SamplingParams
from octavo.engine.prompt import MAX_TOKEN_ID, prompt_array
from octavo.errors import RequestError


@pytest.mark.parametrize(
    "tokens",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        iter([1, 2, 3]),
        [np.int64(1), np.uint8(2), 3],
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint16),
        np.array([1, 0, 2, 0, 3, 0], dtype=np.int32)[::2],
    ],
)
def test_what_becomes_a_prompt(tokens: Any) -> None:
    prompt = prompt_array(tokens)
    assert (prompt.dtype, prompt.shape, prompt.tolist()) == (np.int32, (3,), [1, 2, 3])
    assert prompt.flags.c_contiguous
    with pytest.raises(ValueError, match="read-only"):
        prompt[0] = 9


def test_a_prompt_is_the_callers_no_longer() -> None:
    mine = np.array([1, 2, 3], dtype=np.int32)
    prompt = prompt_array(mine)
    locked = mine.view()
    locked.setflags(write=False)
    of_a_view = prompt_array(locked)
    mine[:] = 7
    assert prompt.tolist() == of_a_view.tolist() == [1, 2, 3]
    assert prompt_array(prompt) is prompt, "made once"


@pytest.mark.parametrize(
    "tokens",
    [
        [True, False],
        [1, True],
        [1, np.True_],
        np.array([True]),
        [1.0],
        [1, 2.5],
        np.array([1.0, 2.0]),
        [None],
        ["a"],
        [[1, 2]],
        np.array([[1, 2]]),
        [np.array([1, 2])],
        [-1],
        np.array([-1]),
        [5, 1 << 40],
        [5, 1 << 80],
        [MAX_TOKEN_ID + 1],
        np.array([1 << 63], dtype=np.uint64),
    ],
)
def test_what_does_not(tokens: Any) -> None:
    with pytest.raises(RequestError) as caught:
        prompt_array(tokens)
    assert caught.value.param == "prompt"
    assert len(str(caught.value)) < 200


def test_the_largest_id_and_none_at_all() -> None:
    assert prompt_array([0, MAX_TOKEN_ID]).tolist() == [0, MAX_TOKEN_ID]
    assert len(prompt_array([])) == len(prompt_array(np.array([]))) == 0


def test_a_request_takes_nothing_else() -> None:
    for wrong in ([1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], dtype=np.int32)):
        with pytest.raises(RequestError, match="prompt"):
            GenerateRequest("r", wrong, SamplingParams())  # type: ignore[arg-type]
    a, b = (GenerateRequest("r", prompt_array([1, 2]), SamplingParams()) for _ in range(2))
    assert a == a
    assert a != b, "compared by identity: comparing arrays has no truth value"


def test_a_long_prompt_takes_milliseconds() -> None:
    array = np.arange(256 << 10) % 1000
    for tokens, limit_s in ((array, 0.02), (array.tolist(), 0.15)):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            prompt_array(tokens)
            times.append(time.perf_counter() - began)
        assert min(times) < limit_s
