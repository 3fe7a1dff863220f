"""Which tokens a grammar allows next, for requests whose output must follow one.

The grammar is a text of llguidance: a JSON schema, a regular expression or a Lark grammar, which the server has tried
out in a process of its own. What takes time - compiling it, and the mask before each token - happens in threads,
outside Python's global lock, so that a slow grammar keeps nobody waiting but its own request. A state follows from the
grammar and the tokens so far alone.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import llguidance
import msgspec

from octavo.model.memory import mask_width
from octavo.scheduler.messages import Submission, Vocabulary

MAX_GRAMMAR_BYTES = 256 << 10
"""Of the text. Beyond it, reading alone would take tens of milliseconds."""

LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1_000,
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_lexer_states=20_000,
    max_grammar_size=20_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Bounds on the work of a compilation and of a mask, and on the memory of a state: a lexer state takes 1 to 2 KB."""

PATIENCE_SECONDS = 0.005
"""How long a step may be held back for masks. A mask takes 20 us in the median; whose takes longer misses the step."""

_THREADS = 2


class GrammarError(ValueError):
    """A grammar cannot be used: one line."""


class TokenizerView:
    """A vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokenizer = llguidance.LLTokenizer(self, eos_token=list(vocabulary.eos_ids))  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Divide text that a grammar forces into tokens, the longest first."""
        return self.tokenizer.greedy_tokenize(text)


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """Return a matcher at its beginning. Raises GrammarError."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    _check(matcher)
    return matcher


def next_mask(matcher: llguidance.LLMatcher) -> bytes:
    """Return which tokens may come next, one bit each; at the end of the grammar only those that end a text.

    Raises GrammarError.
    """
    mask = matcher.compute_bitmask()
    _check(matcher)
    return mask


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(" ".join(matcher.get_error().partition("\n<")[0].split())[:300])


class Grammars:
    """What the grammars over one vocabulary share."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokenizer = TokenizerView(vocabulary).tokenizer
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self.width = mask_width(len(vocabulary.tokens))
        """Bytes of a mask."""


class GrammarState:
    """The place of one request in its grammar, behind the tokens that are there already. Making it returns at once."""

    def __init__(self, grammars: Grammars, grammar: str, output: Sequence[int] = ()) -> None:
        self._grammars = grammars
        self._matcher: llguidance.LLMatcher
        """Made by the first job. Where that fails, the request is refused, and none follows."""
        self.job: Future[bytes] = grammars.threads.submit(self._begin, grammar, output)
        """Makes the next mask. Done when it is there, or has failed."""

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed, or not any further; None as long as it can. Waits if need be."""
        error = self.job.exception()
        return None if error is None else f"the grammar cannot be followed any further: {error}"

    def mask(self) -> bytes:
        """Return the mask for the next token, waiting if need be. After a failure it allows nothing."""
        return self.job.result() if self.job.exception() is None else bytes(self._grammars.width)

    def take(self, token: int) -> None:
        """Go on behind a token that the last mask allowed."""
        self.job = self._grammars.threads.submit(self._advance, (token,))

    def _begin(self, grammar: str, output: Sequence[int]) -> bytes:
        self._matcher = compile_grammar(self._grammars.tokenizer, grammar)
        return self._advance(output)

    def _advance(self, tokens: Sequence[int]) -> bytes:
        if not self._matcher.consume_tokens(list(tokens)):
            _check(self._matcher)
            raise GrammarError("a token is not what the grammar allows")
        return next_mask(self._matcher)[: self._grammars.width]


class Intake:
    """Submissions whose grammars are being compiled. Nobody waits for them: those that come later may pass."""

    def __init__(self) -> None:
        self._grammars: Grammars | None = None
        self._compiling: dict[int, tuple[Submission, GrammarState]] = {}

    def __bool__(self) -> bool:
        return bool(self._compiling)

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take in the vocabulary of all grammars. One without an end is for none: the server refuses them."""
        if vocabulary.eos_ids:
            self._grammars = Grammars(vocabulary)

    def begin(self, submission: Submission, grammar: str) -> None:
        """Start to compile. Raises ValueError before the vocabulary is known."""
        if self._grammars is None:
            raise ValueError("a grammar is submitted before the vocabulary")
        self._compiling[submission.request] = submission, GrammarState(self._grammars, grammar, submission.emitted)

    def drop(self, request: int) -> bool:
        """Forget a submission; False if it is not here."""
        return self._compiling.pop(request, None) is not None

    def pause(self, request: int, paused: bool) -> bool:
        """Pause a submission, or let it go on; False if it is not here."""
        if request not in self._compiling:
            return False
        submission, state = self._compiling[request]
        self._compiling[request] = msgspec.structs.replace(submission, paused=paused), state
        return True

    def finished(self, seconds: float) -> list[tuple[Submission, GrammarState]]:
        """Give out those that are compiled, or have failed. If there are none, wait a little for the first."""
        jobs = [state.job for _, state in self._compiling.values()]
        if jobs and not any(job.done() for job in jobs):
            wait(jobs, seconds, FIRST_COMPLETED)
        done = [number for number, (_, state) in self._compiling.items() if state.job.done()]
        return [self._compiling.pop(number) for number in done]


def await_masks(states: Iterable[GrammarState], seconds: float = PATIENCE_SECONDS) -> None:
    """Wait until the next mask of each is there, but not longer than so many seconds in all."""
    if jobs := [state.job for state in states if not state.job.done()]:
        wait(jobs, seconds)
