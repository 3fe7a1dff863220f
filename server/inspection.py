"""Routes that tell without computing: a text in tokens, a request as the engine would get it, what runs here."""

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request

from octavo.server import __version__, protocol
from octavo.server.body import JSONBody
from octavo.server.describing import matrices
from octavo.server.errors import invalid
from octavo.server.prompts import check_ids, render
from octavo.server.service import Service
from octavo.server.tokenizer import Tokenizer


def add_inspection_routes(app: FastAPI, service: Service) -> None:
    """Add /tokenize, /detokenize, /tokenizer_info, the two render routes, /info and /version."""
    _add_token_routes(app, service)
    _add_render_routes(app, service)

    @app.get("/info", tags=["operate"], summary="The model, its limits and its memory")
    async def info() -> JSONBody:
        return JSONBody(_info(service))

    @app.get("/version", tags=["operate"], summary="The version of this server")
    async def version() -> JSONBody:
        return JSONBody({"version": __version__})


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", tags=["tokens"], summary="The token ids of a text or a conversation")
    async def tokenize(request: Request) -> JSONBody:
        body = await service.read(request, _tokenize_request)
        service.check_model(body.model)
        if isinstance(body, protocol.TokenizeChat):
            text, special = await render(body, service.renderer), body.add_special_tokens is True
        else:
            text, special = body.prompt, body.add_special_tokens is not False
        ids = await service.tokenizer.encode_aside(text, special)
        strings = service.tokenizer if body.return_token_strs else None
        return JSONBody(await asyncio.to_thread(_tokens, ids, service.client.ready.max_model_len, strings))

    @app.post("/detokenize", tags=["tokens"], summary="The text of token ids")
    async def detokenize(request: Request) -> JSONBody:
        body = await service.read(request, partial(protocol.parse, protocol.DetokenizeRequest))
        service.check_model(body.model)
        context = service.client.ready.max_model_len
        if len(body.tokens) > context:
            raise invalid("tokens", f"'tokens' holds {len(body.tokens)} ids; at most {context} make a text here.")
        if body.tokens:
            check_ids(body.tokens, service.client.ready.vocabulary, "tokens", "tokens")
        return JSONBody({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    @app.get("/tokenizer_info", tags=["tokens"], summary="Special tokens and the chat template")
    async def tokenizer_info() -> JSONBody:
        tokenizer = service.tokenizer
        return JSONBody(
            {
                "bos_token": tokenizer.bos_token,
                "eos_token": tokenizer.eos_token,
                "chat_template": tokenizer.chat_template,
                "vocab_size": tokenizer.vocabulary,
                "model_max_length": service.client.ready.max_model_len,
            }
        )


def _tokenize_request(body: bytes) -> protocol.TokenizeChat | protocol.TokenizeText:
    fields = protocol.decode(body)
    if "messages" in fields:
        return protocol.validate(protocol.TokenizeChat, fields)
    return protocol.validate(protocol.TokenizeText, fields)


def _tokens(ids: Sequence[int], context: int, strings: Tokenizer | None) -> bytes:
    """The answer of /tokenize, encoded: it can be long."""
    texts = None if strings is None else [strings.token_text(token) for token in ids]
    return msgspec.json.encode({"count": len(ids), "max_model_len": context, "tokens": ids, "token_strs": texts})


def _add_render_routes(app: FastAPI, service: Service) -> None:
    """What routers use to find the replica that has a prefix in its cache."""

    @app.post("/v1/completions/render", tags=["tokens"], summary="Token ids of each prompt of a completion, not run")
    async def render_completion(request: Request) -> JSONBody:
        return JSONBody(await _rendered(service, request, protocol.CompletionRequest, "cmpl"))

    @app.post("/v1/chat/completions/render", tags=["tokens"], summary="Token ids of a conversation, not run")
    async def render_chat(request: Request) -> JSONBody:
        [prompt] = await _rendered(service, request, protocol.ChatRequest, "chatcmpl")
        return JSONBody(prompt)


async def _rendered(
    service: Service, request: Request, model: type[protocol.CompletionRequest | protocol.ChatRequest], prefix: str
) -> list[dict[str, Any]]:
    """Each prompt as the engine would get it, in the shape of vLLM's render routes."""
    body = await service.read(request, partial(protocol.parse, model))
    service.check_model(body.model)
    prepared = await service.prepare(body)
    name = f"{prefix}-{uuid.uuid4().hex}"
    sampling = asdict(prepared.params[0]) | {"n": prepared.choices, "stop": body.stop, "seed": body.seed}
    del sampling["allowed"]  # a mask; the client's own list says the same
    sampling |= {"allowed_token_ids": body.allowed_token_ids, "bad_words": body.bad_words}
    return [
        {
            "request_id": f"{name}-{index}",
            "token_ids": prompt,
            "sampling_params": sampling | {"max_tokens": limit},
            "model": body.model,
            "stream": body.stream is True,
            "cache_salt": body.cache_salt,
        }
        for index, (prompt, limit) in enumerate(zip(prepared.prompts, prepared.max_tokens, strict=True))
    ]


def _info(service: Service) -> dict[str, Any]:
    """Everything that does not change while the server runs, and how full it is; no path and no secret."""
    ready = service.client.ready
    return {
        "version": __version__,
        "device": ready.device,
        "model": _model(service),
        "limits": {
            **_fields(ready, "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
            **_fields(service.settings, "max_queued_requests", "max_queued_tokens", "max_body_bytes"),
            "n": protocol.MAX_CHOICES,
            "prompts": protocol.MAX_PROMPTS,
            "logprobs": protocol.MAX_LOGPROBS,
            "stop": protocol.MAX_STOPS,
            "stop_length": protocol.MAX_STOP_LENGTH,
        },
        "memory": _memory(service),
        "requests": {"running": service.client.metrics.running, "waiting": service.client.metrics.waiting},
    }


def _model(service: Service) -> dict[str, Any]:
    ready, config = service.client.ready, service.config
    return {
        "id": service.names[0],
        "aliases": list(service.names[1:]),
        **_fields(ready, "architecture", "parameters", "vocabulary", "dtype", "kernels", "batch_invariant"),
        "fingerprint": service.fingerprint,
        "chat": service.template is not None,
        **_fields(config, "layers", "width", "heads", "kv_heads", "head_dim"),
        "block": [asdict(matrix) | {"parameters": matrix.parameters} for matrix in matrices(config)],
    }


def _memory(service: Service) -> dict[str, Any]:
    ready, stats = service.client.ready, service.client.metrics.stats
    return {
        "budget": ready.memory_budget,
        "buckets": [_fields(line, "bucket", "planned", "allocated") for line in ready.memory],
        "kv": {
            "block_size": ready.block_size,
            "bytes_per_token": ready.kv_bytes_per_token,
            "blocks": ready.blocks,
            "used": stats.blocks_referenced,
            "cached": stats.blocks_cached,
            "free": stats.blocks_free,
        },
    }


def _fields(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}
