"""Chat templates come with a checkpoint: what they cost and what they can reach is bounded by a process."""

import asyncio
import subprocess
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.vocabularies import smollm2

from octavo.server import rendering
from octavo.server.rendering import Renderer, conversation, load_template
from octavo.server.template import ChatTemplate, TemplateError, TemplateRequestError
from octavo.server.workers import environment

SOURCE = (
    "{% for message in messages %}"
    "{% if message.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif message.content == 'memory' %}{{ message.content * 10**9 }}"
    "{% elif message.content == 'output' %}{{ message.content * 2 * 10**6 }}"
    "{% else %}<{{ message.role }}>{{ message.content }}{{ message | tojson }}{% endif %}"
    "{% endfor %}"
)
USER = {"role": "user", "content": "a"}


def run(work: Callable[[Renderer], Awaitable[None]]) -> None:
    async def main() -> None:
        renderer = Renderer(ChatTemplate(SOURCE))
        try:
            await work(renderer)
        finally:
            await renderer.pool.close()

    asyncio.run(main())


async def refusal(renderer: Renderer, content: str) -> str:
    with pytest.raises(TemplateRequestError) as caught:
        await renderer.render(conversation([{"role": "user", "content": content}]))
    return str(caught.value)


def test_an_endless_template_is_killed_and_holds_nobody_up_cve_2025_61620_cve_2025_62426_cve_2026_115911(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def work(renderer: Renderer) -> None:
        await renderer.render(conversation([USER]))  # so that the limit is not spent on the start of a process
        monkeypatch.setattr(rendering, "RENDER_SECONDS", 3.0)

        async def endless() -> None:
            assert "more than 3 s" in await refusal(renderer, "loop")
            ended.append("endless")

        async def quick() -> None:
            await renderer.render(conversation([USER]))
            ended.append("quick")

        await asyncio.gather(endless(), quick())
        await renderer.render(conversation([USER]))

    run(work)
    assert ended == ["quick", "endless"]


def test_memory_and_output_of_a_template_are_limited() -> None:
    async def work(renderer: Renderer) -> None:
        assert "Memory" in await refusal(renderer, "memory")
        assert "more than 8 MiB" in await refusal(renderer, "output")
        assert (await renderer.render(conversation([USER]))).startswith("<user>a")

    run(work)


@pytest.mark.parametrize("constant", ["'a' * 5 * 10**7", "'a' | center(5 * 10**7)", "'%050000000d' % 1"])
def test_constants_of_a_template_are_not_computed_in_the_server(constant: str, tmp_path: Path) -> None:
    """Jinja computes them when it compiles: at start-up, before any conversation is there."""
    file = tmp_path / "template.jinja"
    file.write_text("{% if (" + constant + ") == messages %}{% endif %}")
    tokenizer = smollm2()
    tracemalloc.start()
    try:
        template = load_template(file, tokenizer)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
        assert template is not None
        template.compile()
        assert tracemalloc.get_traced_memory()[1] > 40 << 20
    finally:
        tracemalloc.stop()


def test_a_template_that_compiles_for_ever_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "COMPILE_SECONDS", 2.0)
    file = tmp_path / "template.jinja"
    file.write_text("{{ 7 ** (10 ** 8) }}")
    with pytest.raises(TemplateError, match="takes more than 2 s"):
        load_template(file, smollm2())


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


def test_the_worker_says_what_the_template_says() -> None:
    template = ChatTemplate(SOURCE)
    with asyncio.Runner() as runner:
        renderer = Renderer(template)

        @settings(max_examples=100, deadline=None, database=None)
        @given(st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=4))
        @example([{"role": "\n", "content": "\x00\u2028\r\n{{ 1 }}{% endfor %}"}])
        def same(messages: list[dict[str, str]]) -> None:
            assert runner.run(renderer.render(conversation(messages))) == template.render(messages)

        try:
            same()
        finally:
            runner.run(renderer.pool.close())


PROBE = """
import socket, tempfile
from octavo.server.confinement import confine
file = tempfile.TemporaryFile(buffering=0)
confine(256 << 20)
for attempt in (lambda: open("/etc/passwd"), socket.socket, lambda: file.write(b"a")):
    try:
        attempt()
    except OSError as error:
        print(type(error).__name__, error.errno)
try:
    bytearray(1 << 30)
except MemoryError:
    print("MemoryError")
"""


def test_a_worker_can_open_neither_files_nor_sockets_cve_2026_5760() -> None:
    """What escapes from Jinja's sandbox reaches a process that can do little more."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["OSError", "24", "OSError", "24", "OSError", "27", "MemoryError"]


def test_a_worker_is_not_told_the_servers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert "secret" not in environment().values()
