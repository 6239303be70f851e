"""The plain messages between the API and the engine's thread. Nothing here holds engine state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.cache.receipt import Receipt
from octavo.engine.prompt import I32, MAX_TOKEN_ID, is_prompt_array
from octavo.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled"]

MAX_LOGPROBS = 20
MAX_CHOICES = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated on construction; RequestError names the field, its limit and the value.

    Attributes:
        temperature: 0 is greedy (ties go to the lowest token id).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the likeliest.
        repetition_penalty: logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, once, or per occurrence.
        logit_bias: token id -> added to its logit.
        seed: with a seed the same request gives the same tokens, whatever else runs; None draws one.
        max_tokens: None means up to the context's end.
        stop: texts that end generation (one may be given as a plain string); they are not part of the output.
        stop_token_ids: tokens that end generation; not part of the text.
        ignore_eos: go on past the model's end-of-sequence tokens.
        logprobs: None, or how many alternatives to report beside each generated token (0: the token alone).
        prompt_logprobs: the same for prompt tokens. Their logits must be
            computed, so such a request reads no cached page.
        n: how many choices; they share the prompt's pages.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_integer("top_k", self.top_k, 0, 1 << 31)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        # Logits divided by less would leave float32.
        _check_number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_integer("n", self.n, 1, MAX_CHOICES)
        for name, low, high in (
            ("seed", -(1 << 63), (1 << 63) - 1),
            ("max_tokens", 0, 1 << 31),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, low, high)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias maps token ids to numbers, got {_shown(self.logit_bias)}", param="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _check_integer("logit_bias", token, 0, MAX_TOKEN_ID)
            _check_number("logit_bias", bias, -100.0, 100.0)
        self._check_stops()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _check_stops(self) -> None:
        stop: object = self.stop
        if not isinstance(stop, str | Sequence) or not all(isinstance(s, str) for s in self.stop_strings):
            raise RequestError(f"stop is a string or a sequence of strings, got {_shown(stop)}", param="stop")
        if not all(self.stop_strings):
            raise RequestError("stop: an empty stop string matches everywhere; leave it out", param="stop")
        ids: object = self.stop_token_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence):
            raise RequestError(f"stop_token_ids is a sequence of token ids, got {_shown(ids)}", param="stop_token_ids")
        for token in ids:
            _check_integer("stop_token_ids", token, 0, MAX_TOKEN_ID)


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, got {_shown(value)}", param=name)
    # Written so that NaN fails.
    if not ((low < value if open_low else low <= value) and value <= high):
        left = "greater than" if open_low else "at least"
        raise RequestError(f"{name} must be {left} {low} and at most {high}, got {value}", param=name)


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {_shown(value)}", param=name)
    _check_number(name, value, low, high)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


@dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
    """What the engine is asked to do. Compared by identity; `request_id` names it.

    Attributes:
        request_id: unique among the requests that are in flight.
        prompt_token_ids: int32 [n], read-only, as `octavo.engine.prompt.prompt_array` makes it.
        cache_salt: divides the tenant's prefix cache further, as its client chose.
        tenant: whose request it is; requests share pages only within one.

    Raises RequestError where a field has another type.
    """

    request_id: str
    prompt_token_ids: I32
    params: SamplingParams
    cache_salt: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        for name, value in (("request_id", self.request_id), ("cache_salt", self.cache_salt), ("tenant", self.tenant)):
            if not isinstance(value, str):
                raise RequestError(f"{name} must be a string, got {_shown(value)}", param=name)
        if not is_prompt_array(self.prompt_token_ids):
            raise RequestError(
                f"a prompt is an array made by prompt_array, got {_shown(self.prompt_token_ids)}", param="prompt"
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability under the model (temperature 1, no penalties), and the likeliest alternatives.

    `top` is sorted by falling log-probability, ties by token id, and holds as many entries as were asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt has been admitted: how much of it the prefix cache held."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Prompt tokens whose keys and values are in the cache so far (hits included)."""

    request_id: str
    done_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """One entry per prompt token; None for the first, which nothing predicts."""

    request_id: str
    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice. `text` never ends inside a character and never holds part of a stop string.

    `token_ids` are tokens generated since the last delta; `logprobs` matches them if asked for, else is empty. Text may
    trail its tokens (a character or a possible stop string in progress). The last delta of a choice has finish_reason.
    `stop_reason` is the stop string or token id that ended it, or None for end-of-sequence and length.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over; nothing follows.

    Times are in seconds from submission. `completion_tokens` counts all choices, stop tokens included. `receipt` says
    what the cache did.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    kv_bytes: int
    queued_s: float
    first_token_s: float | None
    total_s: float
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Failed:
    """The request is over, with an error (RequestError, OverloadedError, CodecRangeError ...)."""

    request_id: str
    error: Exception


Event = Started | PromptProgress | PromptLogprobs | Delta | Finished | Failed

#: Called on the engine's thread, in order; must not block and must not raise.
Sink = Callable[[Event], None]
