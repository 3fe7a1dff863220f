"""The OpenAPI document: the bodies are read by hand (strictly, and within limits), so their schemas are added here."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from octavo.server import messages_api
from octavo.server import responses as responses_api
from octavo.server.messages_api import CountTokensRequest, MessagesRequest
from octavo.server.openapi_answers import ERROR, responses
from octavo.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeChat, TokenizeText
from octavo.server.responses import ResponsesRequest

BODIES: dict[str, tuple[type[BaseModel], ...]] = {
    "/v1/completions": (CompletionRequest,),
    "/v1/completions/render": (CompletionRequest,),
    "/v1/chat/completions": (ChatRequest,),
    "/v1/chat/completions/render": (ChatRequest,),
    "/v1/responses": (ResponsesRequest,),
    "/v1/messages": (MessagesRequest,),
    "/v1/messages/count_tokens": (CountTokensRequest,),
    "/tokenize": (TokenizeText, TokenizeChat),
    "/detokenize": (DetokenizeRequest,),
}
"""What each route reads: one of these."""

REFUSED: dict[type[BaseModel], Collection[str]] = {
    ResponsesRequest: responses_api.UNSUPPORTED,
    MessagesRequest: messages_api.UNSUPPORTED,
}
"""Fields of a model that its route refuses."""


def document(app: FastAPI) -> dict[str, Any]:
    """Describe the routes of an application, made once and kept by it."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for path, models in BODIES.items():
            for model in models:
                body = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(body.pop("$defs", {}))
                schemas[model.__name__] = body
                for name in REFUSED.get(model, ()):
                    body["properties"].pop(name, None)
            references = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
            content = {"application/json": {"schema": references[0] if len(models) == 1 else {"anyOf": references}}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        schemas |= {"Error": ERROR}
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own, which this server never sends
            schemas.pop(name, None)
        for path, methods in schema["paths"].items():
            for operation in methods.values():
                operation["responses"] = responses(path, operation["responses"])
        app.openapi_schema = schema
    return app.openapi_schema
