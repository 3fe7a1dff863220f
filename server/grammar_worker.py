"""Tries grammars out: `python -m octavo.server.grammar_worker`, a process that the server can kill.

Reads lines of JSON: first the vocabulary, then one `Trial` a line, each answered by a `Verdict`. What takes too
long or too much memory takes this process with it, and nothing else.
"""

import os
import random
import sys
import time
from typing import Any, Literal

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from octavo.scheduler.grammar import GrammarError, TokenizerView, compile_grammar, next_mask
from octavo.scheduler.messages import Vocabulary
from octavo.server.confinement import answer_lines, confine

ADDRESS_SPACE_BYTES = 256 << 20
CPU_SECONDS = 0.25
"""What a grammar may take here, and so about what the engine spends on it."""

TRIAL_TOKENS = 32
"""How far into the grammar its masks are tried, along tokens drawn evenly."""

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
    """Compile a grammar and follow it for some tokens."""
    try:
        grammar = translate(trial)
        started = time.process_time()
        matcher = compile_grammar(tokenizer, grammar)
        draw = random.Random(0)  # noqa: S311 - which tokens does not matter, only that they are always the same
        for _ in range(TRIAL_TOKENS):
            token = _allowed(next_mask(matcher), draw.randrange(tokenizer.vocab_size))
            if time.process_time() - started > CPU_SECONDS:
                return Verdict(error="it is too complex: following it takes too long")
            if token in tokenizer.eos_tokens:
                break
            matcher.consume_token(token)
    except GrammarError as error:
        return Verdict(error=_one_line(str(error)))
    return Verdict(grammar=grammar)


def _allowed(mask: bytes, start: int) -> int:
    """The first allowed token from `start` on; the first of all if none follows."""
    bits = int.from_bytes(mask, "little")
    following = bits >> start << start or bits
    return (following & -following).bit_length() - 1


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def main() -> None:
    """Answer trials until the server closes the pipe."""
    confine(ADDRESS_SPACE_BYTES)
    os.nice(5)
    vocabulary = msgspec.json.decode(sys.stdin.buffer.readline(), type=Vocabulary)
    tokenizer = TokenizerView(vocabulary).tokenizer
    answer_lines(lambda line: msgspec.json.encode(judge(msgspec.json.decode(line, type=Trial), tokenizer)))


if __name__ == "__main__":
    main()
