"""The requests of the OpenAI API as Octavo reads them: fields, types and ranges.

Three rules hold for a field. Implemented: it means exactly what OpenAI's (or, for extensions, vLLM's) document says.
Known but not built, where it would change the answer: refused with 400 naming it. Harmless or unknown: ignored.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from octavo.server.errors import APIError, explain, invalid
from octavo.server.structured import ResponseFormat, StructuredOutputs
from octavo.server.tools import MAX_CALLS, MAX_TOOLS, CalledTool, Tool, ToolChoice

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_BAD_WORDS = 128
MAX_BIASES = 1024
MAX_LOGPROBS = 20
MAX_MESSAGES = 4096
MAX_SHOWN_NAME = 64
"""Longer names of a client's own are not repeated to it."""
MAX_DEPTH = 32
"""Of objects and arrays within each other."""

R = TypeVar("R", bound=BaseModel)

# Fields that change the answer and are not built, with the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "documents": (None,),
    "dry_multiplier": (None, 0, 0.0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "grammar": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "length_penalty": (None, 1, 1.0),
    "logprob_token_ids": (None, []),
    "logits_processors": (None, []),
    "mirostat": (None, 0),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "n_predict": (None,),
    "num_predict": (None,),
    "options": (None, {}),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "repeat_penalty": (None, 1, 1.0),
    "suffix": (None, ""),
    "tfs_z": (None, 1, 1.0),
    "typical_p": (None, 1, 1.0),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
    "xtc_probability": (None, 0, 0.0),
}


def _stop_list(value: Any) -> Any:
    """OpenAI takes one string or several."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _bias_map(value: Any) -> Any:
    """JSON object keys are strings; these are token ids."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object of token ids and biases")
    try:
        return {int(key): float(bias) if isinstance(bias, int) else bias for key, bias in value.items()}
    except (TypeError, ValueError):
        raise ValueError('keys must be token ids, for example {"50256": -100}') from None


def _prompts(value: Any) -> list[str | list[int]]:
    """Bring the four spellings of `prompt` into one list, naming the first thing that is wrong."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists, not empty")
    if isinstance(value[0], int) and not isinstance(value[0], bool):
        return [_token_ids(value, "prompt")]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts fit in one request, not {len(value)}")
    for index, item in enumerate(value):
        if isinstance(item, str) is not isinstance(value[0], str):
            raise ValueError("must not mix strings and lists of token ids")
        if not isinstance(item, str):
            _token_ids(item, f"prompt[{index}]")
    return value


def _token_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a string or a list of token ids, not empty")
    for index, token in enumerate(value):
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"{where}[{index}] is not an integer token id")
    return value


_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class RequestModel(BaseModel):
    """Strict: a string is no number, a float no integer, a boolean neither."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class StreamOptions(RequestModel):
    """Options that only mean something for a stream."""

    include_usage: bool | None = None


def text_schema(kinds: Collection[str] = ("text",)) -> dict[str, Any]:
    """The JSON Schema of what `join_text` takes."""
    properties = {"type": {"enum": list(kinds)}, "text": {"type": "string"}}
    part = {"type": "object", "required": ["type", "text"], "properties": properties}
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]}


def join_text(value: Any, kinds: Collection[str] = ("text",)) -> Any:
    """Join the text parts of a message's content; nothing but text is served. Other values are left as they are."""
    if not isinstance(value, list):
        return value
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            raise ValueError(f'part {index} must be {{"type": "text", "text": ...}}; only text is served')
    return "".join(part["text"] for part in value)


class Message(RequestModel):
    """One message of a conversation."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        str | None, BeforeValidator(join_text), WithJsonSchema({"anyOf": [text_schema(), {"type": "null"}]})
    ] = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[CalledTool] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = Field(None, max_length=256)

    def for_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it: absent fields left out. Raises APIError (400)."""
        message: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [call.for_template(f"{where}.tool_calls[{index}]") for index, call in calls]
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {name: value for name, value in given.items() if value is not None}


class Conversation(RequestModel):
    """What a chat template makes a prompt of."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = False
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = Field(None, max_length=32)


class SamplingFields(RequestModel):
    """The fields that all endpoints which generate share."""

    model: str = Field(max_length=512)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(1, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(None, ge=0, le=MAX_CHOICES)
    temperature: float | None = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(1.0, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(0, ge=-1, lt=2**31)
    min_p: float | None = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    repetition_penalty: float | None = Field(1.0, gt=0, le=1e3, allow_inf_nan=False)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: Annotated[
        dict[int, Bias],
        BeforeValidator(_bias_map),
        WithJsonSchema(
            {
                "type": ["object", "null"],
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                "maxProperties": MAX_BIASES,
            }
        ),
    ] = Field({}, max_length=MAX_BIASES)
    stop: Annotated[
        list[Stop],
        BeforeValidator(_stop_list),
        WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, {"type": "null"}]}),
    ] = Field([], max_length=MAX_STOPS)
    stop_token_ids: list[TokenId] | None = Field(None, max_length=1024)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[BadWord] | None = Field(None, max_length=MAX_BAD_WORDS)
    min_tokens: int | None = Field(0, ge=0, lt=2**31)
    ignore_eos: bool | None = False
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    priority: int | None = Field(0, ge=-(2**31), lt=2**31)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                    _TOKEN_IDS,
                    {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
                ]
            }
        ),
    ]
    max_tokens: int | None = Field(16, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = False
    add_special_tokens: bool | None = True


class ChatRequest(SamplingFields, Conversation):
    """POST /v1/chat/completions."""

    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    parallel_tool_calls: bool | None = True


class TokenizeText(RequestModel):
    """POST /tokenize with a text."""

    model: str | None = Field(None, max_length=512)
    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeChat(Conversation):
    """POST /tokenize with a conversation."""

    model: str | None = Field(None, max_length=512)
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=512)
    tokens: list[TokenId]


def parse(model: type[R], body: bytes, unsupported: Mapping[str, tuple[Any, ...]] = {}) -> R:
    """Read a request body, or raise the 400 that says what is wrong with it. Nothing of a large input is echoed.

    `unsupported`: fields of this endpoint that are refused, beside those of all.
    """
    fields = decode(body)
    refuse_unsupported(fields, unsupported)
    return validate(model, fields)


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body, or raise the 400."""
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(None, f"The body is not valid JSON: {error}", "invalid_json") from None
    except RecursionError:
        raise invalid(None, "The body is not valid JSON: nested too deep.", "invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid(None, "The body must be a JSON object.", "invalid_json")
    _check_depth(fields)
    return fields


def _check_depth(fields: dict[str, Any]) -> None:
    """Raise the 400 for objects and arrays nested too deep. Level by level: deep input must not recurse."""
    level: list[Any] = [fields]
    for _ in range(MAX_DEPTH):
        nested = [item.values() if type(item) is dict else item for item in level]
        level = [item for items in nested for item in items if type(item) in (dict, list)]
        if not level:
            return
    raise invalid(None, f"The body is not valid JSON: nested deeper than {MAX_DEPTH} levels.", "invalid_json")


def validate(model: type[R], fields: Mapping[str, Any]) -> R:
    """Check every field of a request, or raise the 400 that names the first offending one."""
    refuse_unsupported(fields, UNSUPPORTED)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _first_error(error) from None


def refuse_unsupported(fields: Mapping[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Never accept and ignore a field that would change the answer. `unsupported`: the values that would not."""
    for name, value in fields.items():
        neutral = unsupported.get(name)
        if neutral is not None and value not in neutral:
            raise invalid(name, f"'{name}' is not supported by this server.", "unsupported_parameter")


def _first_error(error: ValidationError) -> APIError:
    """One line about the first offending field, without pydantic's internals or the client's own data."""
    first = error.errors(include_url=False)[0]
    path = _path(first["loc"])
    if first["type"] == "missing":
        return invalid(path, f"Missing required parameter: '{path}'.", "missing_required_parameter")
    reason = explain(first["type"], first.get("ctx", {}), first["input"])
    return invalid(str(first["loc"][0]), f"Invalid '{path}': {reason}.")


def _path(location: Sequence[str | int]) -> str:
    """Spell a location as `messages[0].content`, leaving out the names pydantic gives to the arms of a union."""
    path = str(location[0])
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif (
            len(part) <= MAX_SHOWN_NAME
            and part.isidentifier()
            and part not in ("str", "list", "int", "float", "bool", "none")
        ):
            path += f".{part}"
    return path
