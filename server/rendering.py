"""Chat templates in processes of their own, which are killed where they take too long.

A template comes with the model and decides itself what it costs: `server/template_worker.py` compiles and renders it,
the server only parses it.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.server.template import ChatTemplate, TemplateError, TemplateRequestError
from octavo.server.template_worker import Conversation, Rendered
from octavo.server.tokenizer import Tokenizer
from octavo.server.workers import WorkerError, WorkerPool, environment

WORKER_COMMAND = (sys.executable, "-m", "octavo.server.template_worker")
RENDER_SECONDS = 10.0
"""After which a worker that has not answered is killed."""
COMPILE_SECONDS = 20.0
"""The same of the first one, which is tried before anything is served."""


def load_template(file: Path | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in a file, or else the model's own, if it has one. Raises TemplateError if it cannot be compiled."""
    try:
        source = tokenizer.chat_template if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"--chat-template {file}: {error}") from error
    if source is None:
        return None
    template = ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token)
    _try_out(template)
    return template


def _try_out(template: ChatTemplate) -> None:
    """Compile a template in a worker. Raises TemplateError."""
    try:
        done = subprocess.run(  # noqa: S603 - the command is a constant
            WORKER_COMMAND,
            input=_opening(template) + b"\n",
            capture_output=True,
            timeout=COMPILE_SECONDS,
            check=False,
            env=environment(),
        )
    except subprocess.TimeoutExpired:
        message = f"the chat template cannot be compiled: it takes more than {COMPILE_SECONDS:g} s"
        raise TemplateError(message) from None
    if done.returncode:
        message = done.stdout.decode("utf-8", "replace")
        raise TemplateError(message or "the chat template cannot be compiled: it takes too much memory")


def _opening(template: ChatTemplate) -> bytes:
    return msgspec.json.encode((template.source, template.bos_token, template.eos_token))


class Renderer:
    """Renders one template in worker processes."""

    def __init__(self, template: ChatTemplate, max_waiting: int = 1024) -> None:
        """At most `max_waiting` conversations are held at a time; more are answered with 429."""
        self.template = template
        self.pool = WorkerPool(WORKER_COMMAND, _opening(template), max_waiting=max_waiting, subject="conversations")

    async def render(self, question: bytes) -> str:
        """Return the prompt for what `conversation` made. Raises TemplateRequestError or APIError (429)."""
        try:
            answer = msgspec.json.decode(await self.pool.ask(question, RENDER_SECONDS), type=Rendered)
        except WorkerError as error:
            raise TemplateRequestError(str(error)) from None
        if answer.error:
            raise TemplateRequestError(answer.error)
        return answer.text


def conversation(messages: Sequence[Mapping[str, Any]], /, **options: Any) -> bytes:
    """The arguments of `ChatTemplate.render` as a line for a worker."""
    return msgspec.json.encode(Conversation([dict(message) for message in messages], options))
