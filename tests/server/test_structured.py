"""Grammars of clients: what is refused, within what limits, and that nobody else notices."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.schemas import FURTHER, REGEXES, SCHEMAS

from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate
from octavo.scheduler.grammar import Grammars, GrammarState
from octavo.scheduler.messages import Vocabulary
from octavo.server import structured
from octavo.server.errors import APIError
from octavo.server.grammar_worker import Kind, Trial, judge
from octavo.server.structured import WORKER_COMMAND, Constraint, GrammarCompiler
from octavo.server.tokenizer_files import load_tokenizer

ENDLESS = {"type": "integer", "multipleOf": 1_000_003}
"""Takes the library many seconds to compile, and hundreds of megabytes."""


BAD_JSON: list[tuple[str, Any]] = [
    ("no type there is", {"type": "nonsense"}),
    ("a keyword that cannot be enforced", {"type": "array", "items": {}, "uniqueItems": True}),
    ("not", {"not": {"type": "string"}}),
    ("overlapping alternatives", {"oneOf": [{"type": "integer"}, {"type": "number"}]}),
    ("an unknown format", {"type": "string", "format": "nonsense"}),
    ("a reference to elsewhere", {"$ref": "http://169.254.169.254/"}),
    ("a reference to nowhere", {"$ref": "#/$defs/nothing"}),
    ("only itself", {"$ref": "#"}),
    ("itself and more", {"allOf": [{"$ref": "#"}, {"type": "string"}]}),
    ("nothing", False),
    ("an empty range", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("look-behind", {"type": "string", "pattern": "(?<=x)*"}),
    ("half a pattern", {"type": "string", "pattern": "["}),
    ("properties of no object", {"properties": 5}),
    ("an option of the library's own", {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
]
BAD_REGEXES = [
    "(?<=x)*",
    "[",
    "(a",
    "(x{1,1000}){1,1000}",
    "((a{0,100}){0,100}){0,100}",
    "(.|..|...|....){500}z",
    ".*" * 200,
    "(" + "|".join(f"[a-z]*{letter}[a-z]{{8}}" for letter in "abcdefghij") + ")*",
]
BAD_GRAMMARS = ["", "start: nope", "root ::= (", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "\0"]
BAD_GRAMMARS += [
    'start: x\nx: x x | "a"',
    'start: x\nx: x x x x | "a" | "b" | x "a" x',
    "start: " + " | ".join(f"x{i} start" for i in range(1200)) + "\n" + "\n".join(f'x{i}: "a"' for i in range(1200)),
    "start: x0\n" + "\n".join(f"x{i}: x{i + 1} x{i + 1}" for i in range(40)) + '\nx40: "a" | ""',
]
BAD: list[tuple[Kind, str]] = [("json", json.dumps(schema)) for _, schema in BAD_JSON]
BAD += [("regex", regex) for regex in BAD_REGEXES]
BAD += [("grammar", grammar) for grammar in BAD_GRAMMARS]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    tokenizer = load_tokenizer(locate("smollm2"))
    tokens = range(tokenizer.vocabulary)
    return Vocabulary(
        tokens=tuple(map(tokenizer.token_bytes, tokens)),
        special=tuple(filter(tokenizer.is_special, tokens)),
        eos_ids=read_config(locate("smollm2")).eos_ids,
    )


def run(vocabulary: Vocabulary, work: Callable[[GrammarCompiler], Awaitable[None]], *command: str) -> None:
    async def main() -> None:
        compiler = GrammarCompiler(vocabulary, command or WORKER_COMMAND)
        try:
            await work(compiler)
        finally:
            await compiler.pool.close()

    asyncio.run(main())


async def refusal(compiler: GrammarCompiler, kind: Kind, text: str) -> str:
    with pytest.raises(APIError) as caught:
        await compiler.compile(Constraint(kind, text, "the_field"))
    assert (caught.value.status, caught.value.param) == (400, "the_field")
    assert len(caught.value.message) < 1000
    assert "\n" not in caught.value.message
    return caught.value.message


def test_f02_what_cannot_be_followed_is_refused_in_one_line(vocabulary: Vocabulary) -> None:
    async def work(compiler: GrammarCompiler) -> None:
        for kind, text in BAD:
            await refusal(compiler, kind, text)
            assert await compiler.compile(Constraint("regex", "a+", "the_field"))

    run(vocabulary, work)


def test_every_schema_and_expression_of_the_tests_is_accepted(vocabulary: Vocabulary) -> None:
    tokenizer = Grammars(vocabulary).tokenizer
    trials = [Trial("json", json.dumps(schema)) for schema in [*(schema for _, schema, _ in SCHEMAS), *FURTHER]]
    for trial in trials + [Trial("regex", regex) for regex, _ in REGEXES]:
        assert judge(trial, tokenizer).error == "", trial


def test_f02_a_grammar_that_takes_too_long_is_given_up_and_delays_no_other(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "WORKER_SECONDS", 2.0)
    ended: list[str] = []

    async def work(compiler: GrammarCompiler) -> None:
        async def endless() -> None:
            assert "too complex" in await refusal(compiler, "json", json.dumps(ENDLESS))
            ended.append("endless")

        async def quick() -> None:
            await compiler.compile(Constraint("regex", "b+", "the_field"))
            ended.append("quick")

        await compiler.compile(Constraint("regex", "a+", "the_field"))  # so that a worker is there
        await asyncio.gather(quick(), endless())
        workers = compiler.pool.idle
        assert all(worker.intact for worker in workers)
        await compiler.compile(Constraint("regex", "c+", "the_field"))

    run(vocabulary, work)
    assert ended == ["quick", "endless"]


def test_a_worker_that_dies_takes_nothing_with_it(vocabulary: Vocabulary, tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text("import sys\nsys.stdin.readline()\nprint(flush=True)\nsys.stdin.readline()\n")

    async def work(compiler: GrammarCompiler) -> None:
        assert "too much memory" in await refusal(compiler, "regex", "a")
        assert "too much memory" in await refusal(compiler, "regex", "a")
        assert not compiler.pool.idle

    run(vocabulary, work, sys.executable, str(script))


def test_verdicts_are_kept_up_to_a_number_of_bytes(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "CACHE_BYTES", 4096)

    async def work(compiler: GrammarCompiler) -> None:
        for number in range(50):
            await compiler.compile(Constraint("regex", f"a{{{number + 1}}}", "the_field"))
            await refusal(compiler, "regex", f"({number}")
            assert compiler.cached_bytes <= 4096
        assert 2 <= len(compiler._cache) < 20
        compiler.pool._command = ("/nonexistent",)
        await compiler.pool.close()
        assert await compiler.compile(Constraint("regex", "a{50}", "the_field")), "it is known still"
        await refusal(compiler, "regex", "(49")

    run(vocabulary, work)


def test_more_than_may_wait_are_told_to_come_again(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_WAITING", 3)

    async def work(compiler: GrammarCompiler) -> None:
        tries = [compiler.compile(Constraint("regex", f"{number}+", "the_field")) for number in range(10)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        refused = [result for result in results if isinstance(result, APIError)]
        assert [error.status for error in refused] == [429] * 7

    run(vocabulary, work)


def test_a_model_without_an_end_of_sequence_cannot_follow_a_grammar(vocabulary: Vocabulary) -> None:
    endless = Vocabulary(tokens=vocabulary.tokens, special=vocabulary.special, eos_ids=())

    async def work(compiler: GrammarCompiler) -> None:
        assert "end-of-sequence" in await refusal(compiler, "regex", "a")

    run(endless, work)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_hundreds_of_different_schemas_leave_no_memory_behind(vocabulary: Vocabulary) -> None:
    grammars = Grammars(vocabulary)
    sizes = []
    for number in range(400):
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}}, "required": [f"p{number}"]}
        verdict = judge(Trial("json", json.dumps(schema)), grammars.tokenizer)
        assert any(GrammarState(grammars, verdict.grammar).mask())
        if number in (100, 399):
            sizes.append(resident_bytes())
    assert sizes[1] - sizes[0] < 8 << 20
