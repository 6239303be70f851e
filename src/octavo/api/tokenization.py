"""POST /tokenize and POST /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.context import context_of
from octavo.api.errors import JsonResponse, invalid
from octavo.api.openai_chat import render_chat
from octavo.api.schemas.completions import check_token_ids
from octavo.api.schemas.utility import DetokenizeRequest, TokenizeRequest
from octavo.api.token_labels import token_label
from octavo.text.tokenizer import Tokenizer

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    context = context_of(request)
    body = await context.read(request, TokenizeRequest)
    if body.model is not None:
        context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send either prompt or messages", param="prompt")
    tokenizer = context.engine.tokenizer
    tokens = await asyncio.to_thread(_encode, tokenizer, body)
    labels = [token_label(tokenizer, token) for token in tokens] if body.return_token_strs else None
    return JsonResponse(
        {
            "count": len(tokens),
            "max_model_len": context.engine.info.max_model_len,
            "tokens": tokens,
            "token_strs": labels,
        }
    )


def _encode(tokenizer: Tokenizer, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return render_chat(tokenizer, body.messages, body.offered_tools, body.add_generation_prompt)
    assert body.prompt is not None
    return tokenizer.encode(body.prompt, add_special=body.add_special_tokens, parse_special=True)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    context = context_of(request)
    body = await context.read(request, DetokenizeRequest)
    if body.model is not None:
        context.check_model(body.model)
    tokenizer = context.engine.tokenizer
    check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
    text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special=False)
    return JsonResponse({"prompt": text})
