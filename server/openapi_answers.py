"""What answers look like, as JSON Schema: for clients that are made from the OpenAPI document, and for tests."""

from collections.abc import Mapping
from typing import Any

from octavo.server.errors import is_messages

Schema = Mapping[str, Any]


def _object(**properties: Schema) -> Schema:
    """An object with at least these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


STRING, INTEGER, BOOLEAN = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
STRING_OR_NULL, OBJECT_OR_NULL = {"type": ["string", "null"]}, {"type": ["object", "null"]}
REASON = {"enum": ["stop", "length", "tool_calls", None]}

ERROR = _object(error=_object(message=STRING, type=STRING, param=STRING_OR_NULL, code=STRING_OR_NULL))
MESSAGES_ERROR = _object(type={"const": "error"}, error=_object(type=STRING, message=STRING))
EVENT = _object(data=STRING)
"""One server-sent event; the last holds `[DONE]`."""
USAGE = _object(
    prompt_tokens=INTEGER,
    completion_tokens=INTEGER,
    total_tokens=INTEGER,
    prompt_tokens_details=_object(cached_tokens=INTEGER),
)
MODEL = _object(
    id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, max_model_len={"type": "integer"}
)
RENDERED = _object(request_id=STRING, token_ids=_list(INTEGER), sampling_params=OBJECT, model=STRING, stream=BOOLEAN)


def _answer(kind: str, choice: Schema) -> Schema:
    return _object(
        id=STRING,
        object={"const": kind},
        created=INTEGER,
        model=STRING,
        system_fingerprint=STRING,
        choices={"type": "array", "items": choice, "minItems": 1},
        usage=USAGE,
    )


ANSWERS: Mapping[str, Schema] = {
    "/v1/completions": _answer(
        "text_completion", _object(index=INTEGER, text=STRING, logprobs=OBJECT_OR_NULL, finish_reason=REASON)
    ),
    "/v1/chat/completions": _answer(
        "chat.completion",
        _object(
            index=INTEGER,
            message=_object(role={"const": "assistant"}, content=STRING_OR_NULL, refusal={"type": "null"}),
            logprobs=OBJECT_OR_NULL,
            finish_reason=REASON,
        ),
    ),
    "/v1/responses": _object(
        id=STRING,
        object={"const": "response"},
        status={"enum": ["completed", "incomplete"]},
        model=STRING,
        output=_list(_object(type={"const": "message"}, role={"const": "assistant"}, content=_list(OBJECT))),
        usage=_object(input_tokens=INTEGER, output_tokens=INTEGER, total_tokens=INTEGER),
    ),
    "/v1/messages": _object(
        id=STRING,
        type={"const": "message"},
        role={"const": "assistant"},
        model=STRING,
        content=_list(_object(type={"const": "text"}, text=STRING)),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence"]},
        stop_sequence=STRING_OR_NULL,
        usage=_object(input_tokens=INTEGER, output_tokens=INTEGER),
    ),
    "/v1/messages/count_tokens": _object(input_tokens=INTEGER),
    "/v1/completions/render": _list(RENDERED),
    "/v1/chat/completions/render": RENDERED,
    "/tokenize": _object(
        count=INTEGER,
        max_model_len=INTEGER,
        tokens=_list(INTEGER),
        token_strs={"type": ["array", "null"], "items": STRING},
    ),
    "/detokenize": _object(prompt=STRING),
    "/tokenizer_info": _object(
        bos_token=STRING_OR_NULL,
        eos_token=STRING_OR_NULL,
        chat_template=STRING_OR_NULL,
        vocab_size=INTEGER,
        model_max_length=INTEGER,
    ),
    "/v1/models": _object(object={"const": "list"}, data=_list(MODEL)),
    "/v1/models/{name}": MODEL,
    "/version": _object(version=STRING),
    "/info": _object(
        version=STRING,
        device=STRING,
        model=OBJECT,
        limits=OBJECT,
        memory=_object(budget=INTEGER, buckets=_list(OBJECT), kv=OBJECT),
        requests=_object(running=INTEGER, waiting=INTEGER),
    ),
}
"""What each route answers with 200, as JSON."""

STREAMING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Routes that answer with server-sent events where a request asks for a stream."""


def responses(path: str, documented: Mapping[str, Any]) -> dict[str, Any]:
    """The responses of a route: what is documented, and what every route has in common."""
    found = {status: response for status, response in documented.items() if status != "422"}
    schema = MESSAGES_ERROR if is_messages(path) else {"$ref": "#/components/schemas/Error"}
    error = {"application/json": {"schema": schema}}
    found.setdefault("4XX", {"description": "The request is refused.", "content": error})
    if path.startswith("/health"):
        status = {"application/json": {"schema": _object(status=STRING)}}
        found.setdefault("503", {"description": "No request is served now.", "content": status})
    found.setdefault("5XX", {"description": "The request cannot be served.", "content": error})
    if path in ANSWERS:
        content = found["200"].setdefault("content", {})
        content["application/json"] = {"schema": ANSWERS[path]}
        if path in STREAMING:
            content["text/event-stream"] = {"schema": EVENT}
    return found
