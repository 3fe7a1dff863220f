"""Tries grammars out: `python -m octavo.server.grammar_worker`, a process that the server can kill.

Reads lines of JSON: first the vocabulary, then one `Trial` a line, each answered by a `Verdict`. What takes too
long or too much memory takes this process with it, and nothing else.
"""

import os
import random
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from octavo.scheduler.grammar import GrammarError, TokenizerView, compile_grammar, next_mask
from octavo.scheduler.messages import Vocabulary
from octavo.server.confinement import answer_lines, confine

ADDRESS_SPACE_BYTES = 256 << 20
CPU_SECONDS = 0.25
"""What each walk may take here: about 2 ms a token. Grammars of everyday take a tenth of it."""

TRIAL_TOKENS = 128
"""How far into the grammar its masks are tried: far enough for what grows with the square of the length to show."""

Kind = Literal["json", "regex", "grammar", "lark"]

ONE_LINE: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""How JSON is written: as Python's json.dumps does it."""

JSON_OPTIONS: Any = {**ONE_LINE, "coerce_one_of": False, "lenient": False}
"""And what cannot be honoured is an error."""


class Trial(msgspec.Struct, frozen=True):
    """A grammar: a schema as JSON text, a regular expression, Lark or GBNF of a client, or Lark of our own."""

    kind: Kind
    text: str


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """The grammar as the engine takes it, or one line about why not."""

    grammar: str = ""
    error: str = ""


def translate(trial: Trial) -> str:
    """Return the text that llguidance compiles. Raises GrammarError."""
    try:
        if trial.kind == "json":
            return llguidance.LLMatcher.grammar_from_json_schema(trial.text, overrides=JSON_OPTIONS)
        if trial.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(trial.text)
        lark = trial.text if trial.kind == "lark" else any_to_lark(trial.text)
        return llguidance.LLMatcher.grammar_from_lark(lark)
    except (Exception, RecursionError) as error:  # the translation of GBNF raises whatever comes
        raise GrammarError(str(error)) from error


def judge(trial: Trial, tokenizer: llguidance.LLTokenizer) -> Verdict:
    """Compile a grammar and follow it on two ways: along tokens of any length, and byte by byte."""
    try:
        grammar = translate(trial)
        matcher = compile_grammar(tokenizer, grammar)
        for preferred in ((1 << tokenizer.vocab_size) - 1, _single_bytes(tokenizer)):
            _walk(matcher.deep_copy(), tokenizer, preferred)
    except GrammarError as error:
        return Verdict(error=" ".join(str(error).split())[:300])
    return Verdict(grammar=grammar)


def _walk(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, preferred: int) -> None:
    """Follow a grammar from its beginning, along preferred tokens, and to no end before it must. Raises GrammarError.

    preferred: a bit for each token.
    """
    started, going_on = time.process_time(), ~_bits(tokenizer.eos_tokens)
    draw = random.Random(0)  # noqa: S311 - which tokens does not matter, only that they are always the same
    for _ in range(TRIAL_TOKENS):
        allowed = int.from_bytes(next_mask(matcher), "little") & going_on
        if time.process_time() - started > CPU_SECONDS:
            raise GrammarError("it is too complex: following it takes too long")
        if not allowed:
            break
        matcher.consume_token(_next(allowed & preferred or allowed, draw.randrange(preferred.bit_length())))


@cache
def _single_bytes(tokenizer: llguidance.LLTokenizer) -> int:
    """A bit for each token of one byte."""
    found = [tokenizer.tokenize_bytes(bytes([byte])) for byte in range(256)]
    return _bits(tokens[0] for tokens in found if len(tokens) == 1)


def _bits(tokens: Iterable[int]) -> int:
    """A bit for each token."""
    return sum(1 << token for token in set(tokens))


def _next(tokens: int, start: int) -> int:
    """The first of some tokens from `start` on; the first of all if none follows. tokens: a bit for each."""
    following = tokens >> start << start or tokens
    return (following & -following).bit_length() - 1


def main() -> None:
    """Answer trials until the server closes the pipe."""
    confine(ADDRESS_SPACE_BYTES)
    os.nice(5)
    vocabulary = msgspec.json.decode(sys.stdin.buffer.readline(), type=Vocabulary)
    tokenizer = TokenizerView(vocabulary).tokenizer
    answer_lines(lambda line: msgspec.json.encode(judge(msgspec.json.decode(line, type=Trial), tokenizer)))


if __name__ == "__main__":
    main()
