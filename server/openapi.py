"""The OpenAPI document: the bodies are read by hand (strictly, and within limits), so their schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from octavo.server.protocol import ChatRequest, CompletionRequest

BODIES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
}


def document(app: FastAPI) -> dict[str, Any]:
    """Describe the routes of an application, made once and kept by it."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for path, model in BODIES.items():
            body = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(body.pop("$defs", {}))
            schemas[model.__name__] = body
            reference = {"$ref": f"#/components/schemas/{model.__name__}"}
            content = {"application/json": {"schema": reference}}
            schema["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
        app.openapi_schema = schema
    return app.openapi_schema
