"""What the request bodies have in common: strictness, refusals, and the sampling fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from octavo.api.errors import invalid, shorten, unsupported
from octavo.engine.messages import MAX_CHOICES, SamplingParams

MAX_STOP_STRINGS = 16
MAX_LOGIT_BIAS = 1024
MAX_TOKENS = 1 << 31

CacheKey = Annotated[str, StringConstraints(min_length=1, max_length=256)]


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer and is not supported: refused unless it says what happens
    anyway."""

    neutral: tuple[object, ...]
    reason: str

    def accepts(self, value: object) -> bool:
        # By type as well: True == 1 in Python, not in JSON.
        return value is None or any(type(value) is type(ok) and value == ok for ok in self.neutral)


_CONSTRAINED = "constrained decoding is not supported"

#: Fields of OpenAI and vLLM that both completion endpoints refuse.
REFUSED_EVERYWHERE: Mapping[str, Refused] = {
    "guided_json": Refused((), _CONSTRAINED),
    "guided_regex": Refused((), _CONSTRAINED),
    "guided_choice": Refused((), _CONSTRAINED),
    "guided_grammar": Refused((), _CONSTRAINED),
    "structured_outputs": Refused((), _CONSTRAINED),
    "logits_processors": Refused(([],), "logits processors are not supported"),
    "use_beam_search": Refused((False,), "beam search is not supported"),
    "length_penalty": Refused((1.0, 1), "it belongs to beam search, which is not supported"),
    "min_tokens": Refused((0,), "a minimum length is not supported"),
    "bad_words": Refused(([],), "banned words are not supported; logit_bias bans tokens"),
    "allowed_token_ids": Refused((), "a token allow-list is not supported"),
    "include_stop_str_in_output": Refused((False,), "stop strings are never part of the output"),
    "skip_special_tokens": Refused((True,), "control tokens are never part of the output"),
    "truncate_prompt_tokens": Refused((), "prompts are never cut; shorten it before sending"),
    "prompt_logprobs": Refused((), "use echo and logprobs of /v1/completions"),
    "prompt_cache_retention": Refused(
        ("in_memory", "in-memory"), "pages are kept in memory only; send 'in_memory' or leave it out"
    ),
}


class RequestModel(BaseModel):
    """A request body: no coercion ("1" is not 1, true is not 1), unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    refused: ClassVar[Mapping[str, Refused]] = {}

    @classmethod
    def refuse_unsupported(cls, body: Mapping[str, Any]) -> None:
        """Raises ApiError (400, unsupported_parameter) for the first refused field of a parsed body."""
        for name, rule in cls.refused.items():
            if name in body and not rule.accepts(body[name]):
                raise unsupported(f"{name} {shorten(body[name])}: {rule.reason}", param=name)


class StreamOptions(RequestModel):
    """`include_progress` is Octavo's: while the prompt is computed, SSE comments ": prefill DONE/TOTAL" are
    sent."""

    include_usage: bool | None = None
    include_progress: bool | None = None


def cache_division(cache_salt: str | None, prompt_cache_key: str | None = None) -> str:
    """The engine's salt for what a client set: equal only where both fields are, and "" where none is.

    JSON, because joined strings collide: "ab" + "c" is "a" + "bc".
    """
    if cache_salt is None and prompt_cache_key is None:
        return ""
    return json.dumps([cache_salt, prompt_cache_key])


class SamplingFields(RequestModel):
    """Fields of both completion endpoints. None means the default, as an absent field does."""

    model: str
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    seed: int | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=1024)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheKey | None = None
    prompt_cache_key: CacheKey | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: object) -> object:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
            raise PydanticCustomError("stop", "must be a string or an array of strings")
        if len(stops) > MAX_STOP_STRINGS:
            counts = {"limit": MAX_STOP_STRINGS, "count": len(stops)}
            raise PydanticCustomError("stop", "at most {limit} stop strings, got {count}", counts)
        if not all(stops):
            raise PydanticCustomError("stop", "an empty stop string matches everywhere; leave it out")
        return stops

    def check_streaming(self) -> None:
        """Raises ApiError where stream_options come without stream."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed with stream: true", param="stream_options")

    @property
    def cache_division(self) -> str:
        return cache_division(self.cache_salt, self.prompt_cache_key)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def include_progress(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_progress)

    def sampling_params(
        self,
        *,
        vocab_size: int,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Raises ApiError and RequestError."""
        for token in self.stop_token_ids or ():
            check_token_id(token, vocab_size, "stop_token_ids")
        return SamplingParams(
            temperature=_default(self.temperature, 1.0),
            top_k=max(self.top_k or 0, 0),
            top_p=_default(self.top_p, 1.0),
            min_p=_default(self.min_p, 0.0),
            repetition_penalty=_default(self.repetition_penalty, 1.0),
            presence_penalty=_default(self.presence_penalty, 0.0),
            frequency_penalty=_default(self.frequency_penalty, 0.0),
            logit_bias=_parse_logit_bias(self.logit_bias or {}, vocab_size),
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            n=self.n or 1,
        )


def _default(value: float | None, default: float) -> float:
    return default if value is None else value


def check_token_id(token: int, vocab_size: int, param: str) -> None:
    if not 0 <= token < vocab_size:
        raise invalid(f"{param}: token ids are 0 to {vocab_size - 1}, got {shorten(token)}", param=param)


def _parse_logit_bias(bias: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"logit_bias: keys are token ids as strings, got {shorten(key)}", param="logit_bias")
        check_token_id(int(key), vocab_size, "logit_bias")
        if not -100 <= value <= 100:
            message = f"logit_bias of token {key} must be at least -100 and at most 100, got {shorten(value)}"
            raise invalid(message, param="logit_bias")
        parsed[int(key)] = float(value)
    return parsed
