"""What following a grammar costs: compiling it, and the mask of allowed tokens before each token.

    .venv/bin/python bench/grammars.py                          # llguidance, and xgrammar where it is installed

Each grammar is walked along one text that it accepts, on the vocabulary of the default model. CPU time of this thread;
the first two grammars only warm up. Per grammar: the fastest of five compilations, and the median and the largest mask
of the fastest of five walks; the table's last line is over all grammars.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.model.weights.configuration import read_config
from octavo.model.weights.locate import locate
from octavo.server.tokenizer import Tokenizer
from octavo.server.tokenizer_files import load_tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.schemas import REGEXES, SCHEMAS, instance_text

ROUNDS = 5
END_IDS = read_config(locate("smollm2")).eos_ids

Walk = Callable[[Sequence[int]], list[float]]
"""Takes the tokens of an accepted text; returns the seconds that each mask took."""


@dataclass(frozen=True)
class Library:
    """One way to follow grammars."""

    name: str
    compile: Callable[[str, Any], Walk]
    """Takes "schema" or "regex" and its value. Raises ValueError where the library does not serve it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    tokenizer = load_tokenizer(locate("smollm2"))
    cases = [("schema", name, schema, instance_text(instance)) for name, schema, instance in SCHEMAS[:20]]
    cases += [("regex", regex, regex, text) for regex, text in REGEXES[:8]]
    for library in libraries(tokenizer):
        print(f"{library.name}: {'grammar':<28} {'compile':>10} {'mask':>10} {'largest':>10}")
        for kind, _, value, _ in cases[:2]:
            library.compile(kind, value)
        compiled, masks = [], []
        for kind, name, value, text in cases:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            try:
                seconds, walked = measure(library, kind, value, tokens)
            except ValueError as error:
                print(f"{name[:38]:<40} not served: {error}")
                continue
            compiled.append(seconds)
            masks += walked
            print(f"{name[:38]:<40} {line(seconds, walked)}")
        print(f"{f'{len(compiled)} grammars, {len(masks)} masks':<40} {line(statistics.median(compiled), masks)}")
        print(f"{'':<40} slowest compilation {max(compiled) * 1e6:,.0f} us\n", flush=True)


def line(seconds: float, masks: Sequence[float]) -> str:
    figures = (seconds, statistics.median(masks), max(masks))
    return " ".join(f"{figure * 1e6:>7,.0f} us" for figure in figures)


def measure(library: Library, kind: str, value: Any, tokens: Sequence[int]) -> tuple[float, list[float]]:
    """Return the seconds of the fastest compilation, and of each mask in the fastest walk."""
    times, walks = [], []
    for _ in range(ROUNDS):
        started = time.thread_time()
        walk = library.compile(kind, value)
        times.append(time.thread_time() - started)
        walks.append(walk(tokens))
    return min(times), min(walks, key=sum)


def libraries(tokenizer: Tokenizer) -> list[Library]:
    found = [llguidance_library(tokenizer)]
    if importlib.util.find_spec("xgrammar") is not None:
        found.append(xgrammar_library(tokenizer))
    return found


def timed(action: Callable[[], object]) -> float:
    started = time.thread_time()
    action()
    return time.thread_time() - started


def llguidance_library(tokenizer: Tokenizer) -> Library:
    import llguidance  # noqa: PLC0415 - the two libraries are loaded one after the other

    class Vocabulary:
        is_tokenizer_wrapper = True
        tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary)]  # noqa: RUF012
        special_token_ids = [i for i in range(tokenizer.vocabulary) if tokenizer.is_special(i)]  # noqa: RUF012
        bos_token_id = tokenizer.bos_id
        eos_token_id = END_IDS[0]

        def __call__(self, text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

    vocabulary = llguidance.LLTokenizer(Vocabulary(), eos_token=list(END_IDS))
    options = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}

    def compile_grammar(kind: str, value: Any) -> Walk:
        if kind == "schema":
            grammar = llguidance.LLMatcher.grammar_from_json_schema(value, overrides=options)
        else:
            grammar = llguidance.LLMatcher.grammar_from_regex(value)
        matcher = llguidance.LLMatcher(vocabulary, grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])

        def walk(tokens: Sequence[int]) -> list[float]:
            seconds = []
            for token in tokens:
                seconds.append(timed(matcher.compute_bitmask))
                if not matcher.consume_token(token):
                    raise ValueError("the text is not accepted")
            return [*seconds, timed(matcher.compute_bitmask)]

        return walk

    return Library("llguidance", compile_grammar)


def xgrammar_library(tokenizer: Tokenizer) -> Library:
    import xgrammar  # noqa: PLC0415

    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocabulary)]
    info = xgrammar.TokenizerInfo(
        tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=list(END_IDS)
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bitmask = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile_grammar(kind: str, value: Any) -> Walk:
        try:
            if kind == "schema":
                compiled = compiler.compile_json_schema(json.dumps(value), any_whitespace=False, strict_mode=False)
            else:
                compiled = compiler.compile_regex(value)
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0][:60]) from error
        matcher = xgrammar.GrammarMatcher(compiled)

        def walk(tokens: Sequence[int]) -> list[float]:
            seconds = []
            for token in tokens:
                seconds.append(timed(lambda: matcher.fill_next_token_bitmask(bitmask)))
                if not matcher.accept_token(token):
                    raise ValueError("the text is not accepted")
            return [*seconds, timed(lambda: matcher.fill_next_token_bitmask(bitmask))]

        return walk

    return Library("xgrammar", compile_grammar)


if __name__ == "__main__":
    main()
