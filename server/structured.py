"""Structured output: what a request may ask for, and the grammar that follows from it.

A grammar is tried out in a process of its own (`server/grammar_worker.py`), killed where it takes too long, before
the engine hears of it. Verdicts are kept, good and bad, up to a number of bytes.
"""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BaseModel, ConfigDict, Field, model_validator

from octavo.scheduler.grammar import MAX_GRAMMAR_BYTES
from octavo.scheduler.messages import Ready, Vocabulary
from octavo.server.errors import invalid
from octavo.server.grammar_worker import Kind, Trial, Verdict
from octavo.server.tokenizer import Tokenizer
from octavo.server.workers import WorkerError, WorkerPool

WORKER_COMMAND = (sys.executable, "-m", "octavo.server.grammar_worker")
WORKER_SECONDS = 5.0
"""After which a worker that has not answered is killed."""
MAX_WAITING = 64
"""Requests that may wait for a worker; more are answered with 429."""
CACHE_BYTES = 8 << 20

_OVERHEAD_BYTES = 256
"""Of a cached verdict, beside its texts."""

Choice = Annotated[str, Field(min_length=1, max_length=4096)]
SchemaName = Annotated[str, Field(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_-]+$")]


class _Fields(BaseModel):
    """Strict, and without room for what would be ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _SchemaFields(_Fields):
    """OpenAI's wrapping of a schema. Whether `strict` or not, the schema is enforced."""

    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class JSONSchemaFormat(_SchemaFields):
    """The `json_schema` of a `response_format`."""

    name: SchemaName


class ResponseFormat(_Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


class TextFormat(_SchemaFields):
    """The same as the `text.format` of /v1/responses: one object."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: SchemaName | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("a json_schema needs 'name' and 'schema'")
        return self

    def spelled(self) -> dict[str, Any]:
        """The object as it was sent, without what is null."""
        return {key: value for key, value in self.model_dump(by_alias=True).items() if value is not None}

    def as_response_format(self) -> ResponseFormat:
        """The same, as a chat asks for it."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = {key: value for key, value in self.spelled().items() if key != "type"}
        return ResponseFormat(type=self.type, json_schema=JSONSchemaFormat.model_validate(schema))


class StructuredOutputs(_Fields):
    """vLLM's `structured_outputs`: exactly one of the first four."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Choice] | None = Field(None, min_length=1, max_length=1024)
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    """Accepted: white space is never free."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must follow."""

    kind: Kind
    text: str
    param: str
    """The field that asks for it."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The same, as the engine takes it."""

    text: str
    param: str
    """The field that asks for it."""


def constraint_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Constraint | None:
    """Return what the two fields ask for; None if nothing. Raises APIError (400)."""
    constraints = [*_from_outputs(outputs), *_from_format(response_format)]
    if len(constraints) > 1:
        raise invalid("structured_outputs", "Invalid 'structured_outputs': only one constraint can be followed.")
    if not constraints:
        return None
    if len(constraints[0].text) > MAX_GRAMMAR_BYTES:
        param = constraints[0].param
        raise invalid(param, f"Invalid '{param}': it is longer than {MAX_GRAMMAR_BYTES} characters.")
    return constraints[0]


def _from_format(response_format: ResponseFormat | None) -> Sequence[Constraint]:
    param = "response_format"
    if response_format is None or response_format.type == "text":
        return ()
    if response_format.type == "json_object":
        return (Constraint("json", '{"type": "object"}', param),)
    if response_format.json_schema is None:
        raise invalid(param, "Missing required parameter: 'response_format.json_schema'.", "missing_required_parameter")
    schema = response_format.json_schema.schema_
    return (Constraint("json", json_text({"type": "object"} if schema is None else schema), param),)


def _from_outputs(outputs: StructuredOutputs | None) -> Sequence[Constraint]:
    if outputs is None:
        return ()
    param = "structured_outputs"
    constraints = []
    if outputs.json_ is not None:
        schema = outputs.json_ if isinstance(outputs.json_, str) else json_text(outputs.json_)
        constraints.append(Constraint("json", schema, param))
    if outputs.regex is not None:
        constraints.append(Constraint("regex", outputs.regex, param))
    if outputs.choice is not None:
        constraints.append(Constraint("lark", "start: " + " | ".join(map(literal, outputs.choice)), param))
    if outputs.grammar is not None:
        constraints.append(Constraint("grammar", outputs.grammar, param))
    if len(constraints) != 1:
        raise invalid(param, f"Invalid '{param}': give exactly one of json, regex, choice and grammar.")
    return constraints


def json_text(value: Any) -> str:
    """Return a value as JSON."""
    return msgspec.json.encode(value).decode()


def literal(text: str) -> str:
    """Return a text as a string of a Lark grammar."""
    return json_text(text)


def vocabulary_of(tokenizer: Tokenizer, ready: Ready) -> Vocabulary:
    """Describe the tokens to those who follow grammars."""
    tokens = range(ready.vocabulary)
    return Vocabulary(
        tokens=tuple(tokenizer.token_bytes(token) for token in tokens),
        special=tuple(token for token in tokens if tokenizer.is_special(token)),
        eos_ids=tuple(token for token in ready.eos_ids if token in tokens),
    )


class GrammarCompiler:
    """Turns constraints into grammars for the engine."""

    def __init__(self, vocabulary: Vocabulary, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.vocabulary = vocabulary
        self.pool = WorkerPool(command, msgspec.json.encode(vocabulary), max_waiting=MAX_WAITING, subject="grammars")
        self._cache: OrderedDict[Trial, Verdict] = OrderedDict()
        self.cached_bytes = 0

    async def compile(self, constraint: Constraint) -> str:
        """Return the grammar that the engine follows. Raises APIError: 400 for one that cannot be used, or 429."""
        if not self.vocabulary.eos_ids:
            raise invalid(
                constraint.param,
                f"'{constraint.param}' needs a model with an end-of-sequence token; this one declares none.",
                "unsupported_parameter",
            )
        trial = Trial(constraint.kind, constraint.text)
        verdict = self._cache.get(trial)
        if verdict is None:
            verdict = await self._try(trial)
            self._keep(trial, verdict)
        self._cache.move_to_end(trial)
        if verdict.error:
            raise invalid(constraint.param, f"Invalid '{constraint.param}': {verdict.error}")
        return verdict.grammar

    async def _try(self, trial: Trial) -> Verdict:
        try:
            answer = await self.pool.ask(msgspec.json.encode(trial), WORKER_SECONDS)
        except WorkerError as error:
            return Verdict(error=f"it is too complex: compiling {error}")
        return msgspec.json.decode(answer, type=Verdict)

    def _keep(self, trial: Trial, verdict: Verdict) -> None:
        self._cache[trial] = verdict
        self.cached_bytes += _size(trial, verdict)
        while self.cached_bytes > CACHE_BYTES and len(self._cache) > 1:
            self.cached_bytes -= _size(*self._cache.popitem(last=False))


def _size(trial: Trial, verdict: Verdict) -> int:
    return len(trial.text.encode()) + len(verdict.grammar.encode()) + len(verdict.error.encode()) + _OVERHEAD_BYTES
