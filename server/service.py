"""What the routes share: the engine, what knows its model's text, and who may start a request."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fastapi import Request

from octavo.model.config import ModelConfig
from octavo.model.step import SamplingParams
from octavo.scheduler.messages import Submission
from octavo.server import __version__
from octavo.server.body import T, read
from octavo.server.choice import Choice
from octavo.server.client import EngineClient
from octavo.server.errors import APIError, draining, engine_unavailable, invalid, queue_full
from octavo.server.health import READY, STALL_SECONDS
from octavo.server.life import Origin
from octavo.server.prepare import Prepared, Served, prepare_chat, prepare_completion
from octavo.server.protocol import MAX_SHOWN_NAME, ChatRequest, CompletionRequest, SamplingFields
from octavo.server.rendering import Renderer
from octavo.server.settings import ServerSettings
from octavo.server.spawning import EngineError
from octavo.server.structured import Grammar, GrammarCompiler, constraint_of, vocabulary_of
from octavo.server.template import ChatTemplate
from octavo.server.text import TextStream
from octavo.server.tokenizer import Tokenizer
from octavo.server.tool_grammar import with_calls
from octavo.server.tool_parsers import ToolFormat
from octavo.server.tools import choose_format, usable_tools


@dataclass(slots=True)
class Service:
    """What the routes share."""

    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    names: Sequence[str]
    """Served model names; the first is the one that answers carry by default."""
    config: ModelConfig
    settings: ServerSettings
    defaults: SamplingParams = field(default_factory=SamplingParams)
    """What holds where a request says nothing."""
    stall_seconds: float = STALL_SECONDS
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    grammars: GrammarCompiler = field(init=False)
    tool_format: ToolFormat = field(init=False)
    renderer: Renderer | None = field(init=False)

    def __post_init__(self) -> None:
        self.tool_format = choose_format(self.settings.tool_call_parser, self.template, self.tokenizer)
        waiting = self.client.ready.max_num_seqs + self.settings.max_queued_requests
        self.renderer = Renderer(self.template, waiting) if self.template is not None else None
        self.grammars = GrammarCompiler(vocabulary_of(self.tokenizer, self.client.ready))

    def open(self) -> None:
        """Prepare the engine for requests that follow a grammar. To be called on the loop."""
        self.client.learn(self.grammars.vocabulary)

    async def close(self) -> None:
        """End what was started beside the engine."""
        await self.grammars.pool.close()
        if self.renderer is not None:
            await self.renderer.pool.close()

    @property
    def fingerprint(self) -> str:
        """Identifies what computes the answers: weights and their division, dtype, code path and version."""
        ready = self.client.ready
        computing = (ready.dtype, ready.quantised, ready.kernels, ready.tensor_parallel_size)
        parts = (ready.architecture, ready.weights_digest, *computing, __version__)
        return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def condition(self) -> str:
        """READY, or why requests should be sent elsewhere."""
        if self.draining:
            return "draining"
        if not self.client.alive:
            return "engine dead"
        if self.client.restarting:
            return "engine restarting"
        return "stalled" if self.client.metrics.heartbeat_age > self.stall_seconds else READY

    def check_model(self, name: str | None) -> None:
        """Raise the 404 for a model that is not served; None means whichever is."""
        if name is not None and name not in self.names:
            served = ", ".join(map(repr, self.names))
            message = f"The model {name[:MAX_SHOWN_NAME]!r} is not served here; served: {served}."
            raise APIError(404, message, param="model", code="model_not_found")

    def admit(self, generations: int, prompt_tokens: int = 0) -> None:
        """Raise 503 or 429 where new work cannot be taken now.

        Whatever its prompt, a request is taken where no other waits: else some could never be.
        """
        metrics = self.client.metrics
        if self.draining:
            metrics.rejected("draining")
            raise draining()
        if not self.client.alive:
            raise engine_unavailable()
        if self.client.live + generations > self.client.ready.max_num_seqs + self.settings.max_queued_requests:
            metrics.rejected("queue_full")
            raise queue_full(f"{self.settings.max_queued_requests} requests")
        if metrics.queued_tokens and metrics.queued_tokens + prompt_tokens > self.settings.max_queued_tokens:
            metrics.rejected("queue_tokens")
            raise queue_full(f"{self.settings.max_queued_tokens} prompt tokens")

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """Read a JSON body and parse it. Raises 413 or 415, and what `parse` raises."""
        return await read(request, self.settings.max_body_bytes, parse)

    async def prepare(self, request: CompletionRequest | ChatRequest) -> Prepared:
        """Bring a request to what the engine can run. Raises APIError (400)."""
        policy = self.settings.max_tokens_policy
        served = Served(self.tokenizer, self.renderer, self.client.ready, policy, self.defaults)
        if isinstance(request, ChatRequest):
            return await prepare_chat(request, served)
        return await prepare_completion(request, served)

    async def grammar(self, request: SamplingFields) -> Grammar | None:
        """Return what every choice must follow, if there is anything. Raises APIError (400, 429)."""
        constraint = constraint_of(request.response_format, request.structured_outputs)
        if isinstance(request, ChatRequest):
            constraint = with_calls(request, constraint, self.tool_format, self.tokenizer)
        if constraint is None:
            return None
        for name in ("ignore_eos", "allowed_token_ids", "bad_words"):
            if getattr(request, name):
                raise invalid(name, f"'{name}' cannot be combined with '{constraint.param}'.")
        return Grammar(await self.grammars.compile(constraint), constraint.param)

    def start(
        self, request: SamplingFields, prepared: Prepared, grammar: Grammar | None, origin: Origin
    ) -> list[Choice]:
        """Submit every choice of every prompt. Choice i of prompt p has index p * n + i."""
        generations = len(prepared.prompts) * prepared.choices
        self.admit(generations, prepared.choices * sum(map(len, prepared.prompts)))
        tools = isinstance(request, ChatRequest) and usable_tools(request.tools, request.tool_choice)
        show_stop = request.include_stop_str_in_output is True
        choices: list[Choice] = []
        try:
            for prompt, limit in zip(prepared.prompts, prepared.max_tokens, strict=True):
                for params in prepared.params:
                    text = TextStream(
                        self.tokenizer,
                        request.stop,
                        include_stop=show_stop,
                        # The marks of calls may be special tokens.
                        skip_special_tokens=request.skip_special_tokens is not False and not tools,
                        # What follows a grammar begins with its first character.
                        continuing=isinstance(request, CompletionRequest) or grammar is not None,
                    )
                    submission = Submission(
                        prompt=prompt,
                        params=params,
                        max_tokens=limit,
                        salt=prepared.salt,
                        grammar=None if grammar is None else grammar.text,
                        priority=request.priority or 0,
                    )
                    generation = self.client.submit(submission)
                    number = f"/{len(choices)}" if generations > 1 else ""
                    own = replace(origin, identity=origin.identity + number)
                    self.client.metrics.originates(generation.request, own)
                    generation.expire(self.settings.queue_timeout, self.settings.request_timeout)
                    choice = Choice(len(choices), generation, text, show_stop_ids=show_stop)
                    choice.constraint = None if grammar is None else grammar.param
                    choices.append(choice)
        except EngineError:
            raise engine_unavailable() from None
        return choices
