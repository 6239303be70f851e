"""What can never be served is refused when it is submitted, with the limit and the value."""

from __future__ import annotations

from octavo.engine.client import EngineInfo
from octavo.engine.messages import GenerateRequest
from octavo.errors import RequestError


def checked_max_tokens(request: GenerateRequest, info: EngineInfo) -> int:
    """The number of tokens to generate at most. Raises RequestError for a request that can never be served.

    `info.max_model_len` is within what the page budget holds, so a request within it fits when it is alone.
    """
    _check_token_ids(request, info.vocab_size)
    n_prompt, limit = len(request.prompt_token_ids), info.max_model_len
    wanted = request.params.max_tokens
    needed = n_prompt + (1 if wanted is None else wanted)
    if needed > limit:
        output = "at least 1 for the output" if wanted is None else f"max_tokens {wanted}"
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, your request needs {needed} tokens: "
            f"{n_prompt} in the prompt and {output}.",
            param="prompt" if n_prompt >= limit else "max_tokens",
            code="context_length_exceeded",
        )
    return limit - n_prompt if wanted is None else wanted


def _check_token_ids(request: GenerateRequest, vocab_size: int) -> None:
    prompt, params = request.prompt_token_ids, request.params
    if not len(prompt):
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    named = {
        "prompt": (int(prompt.min()), int(prompt.max())),
        "logit_bias": tuple(params.logit_bias),
        "stop_token_ids": params.stop_token_ids,
    }
    for param, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise RequestError(
                    f"{param}: token id {token} is outside the vocabulary of {vocab_size} tokens", param=param
                )
