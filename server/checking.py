"""`octavo check`: everything `octavo serve` decides and reads before it allocates, and nothing beyond."""

from collections.abc import Iterator
from pathlib import Path

from octavo.model.kernels.cores import available_cores
from octavo.model.weights.headers import check_headers
from octavo.model.weights.locate import locate
from octavo.model.workspaces import Workspaces
from octavo.scheduler.messages import EngineConfig
from octavo.scheduler.planning import Machine
from octavo.scheduler.sizing import available_memory, context_length, memory_capacity
from octavo.server.plan_report import text
from octavo.server.planning import Forecast, Question, forecast
from octavo.server.settings import Settings

HELP = """\
Do what `octavo serve` does with the same options before it allocates anything: read the settings, the headers of the
checkpoint, the tokenizer and the chat template, choose device and kernels, and plan the memory. No port is opened and
no weight is read, so it can run beside a server.
"""
EXIT_CODES = """\
exit codes: those with which `octavo serve` would end
   0  it could start
  64  an option, a variable or their combination is wrong, or the memory does not suffice
  65  the model's files are missing or damaged
  69  the device cannot be used
"""


def check_model(engine: EngineConfig) -> Path:
    """Return where a model is. Raises what is wrong with its files, or with their context, without importing torch."""
    path = locate(engine.model)
    context_length(engine, check_headers(path, engine.load_format).max_context)
    return path


def check(settings: Settings) -> tuple[int, Iterator[str]]:
    """Return the exit code and the lines of `octavo check`. Every error it raises has an exit code."""
    engine, server = settings.engine, settings.server
    path = check_model(engine)
    # Imported late, as for `octavo serve`: what is wrong up to here is said without waiting for torch.
    from octavo.scheduler.loading import choose, gpu_memory  # noqa: PLC0415
    from octavo.server.rendering import load_template  # noqa: PLC0415
    from octavo.server.tokenizer_files import load_tokenizer  # noqa: PLC0415

    tokenizer = load_tokenizer(path)
    template = load_template(server.chat_template, tokenizer)
    checkpoint, placement = choose(engine)
    name, kernels = str(placement.dtype).removeprefix("torch."), placement.kernels
    question = Question(
        model=checkpoint.config,
        engine=engine,
        machine=Machine(memory_capacity(), available_cores()),
        dtype=name,
        fp8=kernels.fp8 is not None,
        panels=kernels.panels,
        device=gpu_memory(placement),
        devices=placement.ranks,
        workspaces=placement.workspaces or Workspaces(),
    )
    answer = forecast(question)
    notes = [f"kernels    {kernels.name}"]
    if template is None:
        notes.append("note       no chat template: /v1/chat/completions will refuse; give --chat-template")
    return 0 if answer.fits else 64, _lines(settings, answer, notes)


def _lines(settings: Settings, answer: Forecast, notes: list[str]) -> Iterator[str]:
    given = " ".join(f"{flag} {value}" for flag, value in settings.changed.items())
    yield f"settings   {given or 'all at their defaults'}"
    yield from notes
    if answer.memory.total > (available := available_memory()):
        yield f"note       {answer.memory.total:,} B are planned; the system can give {available:,} B at the moment"
    yield ""
    yield from text(answer)
