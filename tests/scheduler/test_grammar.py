"""Requests that follow a grammar, through the real scheduler and loop, on a device that takes the mask's word."""

import re
import threading
from random import Random

import llguidance
import msgspec
import pytest
from support.fake_device import ScriptedRunner
from support.scheduling import BLOCK_SIZE, EOS, VOCABULARY, check, make_scheduler, next_token, submission

from octavo.model.step import SamplingParams, Step
from octavo.scheduler.engine import Engine
from octavo.scheduler.grammar import Grammars, GrammarState, TokenizerView, compile_grammar
from octavo.scheduler.messages import Abort, Pause, Shutdown, StepReport, Submission, ToEngine, Vocabulary

PIECES = [
    b"",
    *(bytes([byte]) for byte in b"abcdefghij0123456789,: "),
    b"ab",
    b"abc",
    b"01",
    b"12",
    b"ja",
    b", ",
    b": ",
]
VOCABULARY_MESSAGE = Vocabulary(tokens=(*PIECES, *[b""] * (VOCABULARY - len(PIECES))), special=(EOS,), eos_ids=(EOS,))
REGEXES = ["[a-c]{2,6}", "(ab|cd)*j", "[0-9]{3}: [a-j]+", "a(, a){3}", "(0|1)+", "abc", "[a-j]*"]


def grammar(regex: str) -> str:
    return llguidance.LLMatcher.grammar_from_regex(regex)


def text_of(tokens: list[int]) -> str:
    return b"".join(VOCABULARY_MESSAGE.tokens[token] for token in tokens).decode()


def alone(request: Submission) -> list[int]:
    """What a request yields, found with nothing but a matcher."""
    assert request.grammar is not None
    matcher = compile_grammar(TokenizerView(VOCABULARY_MESSAGE).tokenizer, request.grammar)
    output: list[int] = []
    while len(output) < request.max_tokens:
        mask = int.from_bytes(matcher.compute_bitmask(), "little") & (1 << VOCABULARY) - 1
        if len(output) < request.params.min_tokens and mask & ~(1 << EOS):
            mask &= ~(1 << EOS)
        token = next_token([*request.prompt, *output])
        assert token is not None
        while not mask >> token & 1:
            token = (token + 1) % VOCABULARY
        output.append(token)
        if token == EOS:
            break
        matcher.consume_token(token)
    return output


class Lines:
    """Delivers submissions before certain turns, and a Shutdown when all have ended."""

    def __init__(self, arrivals: list[tuple[int, ToEngine]], requests: int) -> None:
        self.arrivals = arrivals
        self.left = requests
        self.turn = 0
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, str] = {}

    def receive(self, block: bool) -> list[ToEngine]:
        self.turn += 1
        assert self.turn < 20_000, "requests do not come to their end"
        due = [message for at, message in self.arrivals if at == self.turn]
        if due or not block:
            return due
        if self.left == 0:
            return [Shutdown()]
        return self.receive(block)

    def send(self, message: StepReport) -> None:
        for event in message.events:
            if event.token is not None:
                self.tokens.setdefault(event.request, []).append(event.token)
            if event.finish is not None:
                self.finishes[event.request] = event.finish
                self.left -= 1


class CheckingRunner(ScriptedRunner):
    """Also checks that a row that samples under a grammar has a mask, and that the books are in order."""

    def __init__(self) -> None:
        super().__init__(next_token, VOCABULARY, BLOCK_SIZE)
        self.scheduler = make_scheduler(blocks=24, rows=6, tokens=8)
        self.masked = 0

    def submit(self, step: Step):
        check(self.scheduler)
        self.masked += sum(row.mask is not None for row in step.rows)
        return super().submit(step)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_yields_what_its_grammar_and_the_model_say(seed: int, lookahead: int) -> None:
    random = Random(seed)
    requests = [
        Submission(
            request=number,
            prompt=tuple(random.randrange(1, 50) for _ in range(random.randrange(1, 20))),
            params=SamplingParams(temperature=0, min_tokens=random.choice([0, 0, 0, 4])),
            max_tokens=random.randrange(1, 25),
            grammar=grammar(random.choice(REGEXES)) if number % 4 else None,
        )
        for number in range(12)
    ]
    arrivals: list[tuple[int, ToEngine]] = [(1, VOCABULARY_MESSAGE)]
    arrivals += [(random.randrange(2, 15), request) for request in requests]
    pauses = [(random.randrange(2, 30), number) for number in random.sample(range(12), 6)]
    arrivals += [(at, Pause(request=number, paused=True)) for at, number in pauses]
    arrivals += [(at + random.randrange(20), Pause(request=number, paused=False)) for at, number in pauses]
    channel, runner = Lines(arrivals, len(requests)), CheckingRunner()
    Engine(runner.scheduler, runner, channel, lookahead).run()
    assert runner.masked
    assert runner.scheduler.pool.referenced == 0
    for request in requests:
        if request.grammar is not None:
            assert channel.tokens[request.request] == alone(request)
            if channel.finishes[request.request] == "stop":
                regex = next(regex for regex in REGEXES if grammar(regex) == request.grammar)
                assert re.fullmatch(regex, text_of(channel.tokens[request.request][:-1]))


def run(*batches: list[ToEngine], requests: int) -> Lines:
    channel = Lines([(turn + 1, item) for turn, batch in enumerate(batches) for item in batch], requests)
    runner = CheckingRunner()
    Engine(runner.scheduler, runner, channel).run()
    return channel


def follow(request: int, text: str, **more: int) -> Submission:
    plain = submission(request, [1, 2, 3], **more)
    return Submission(
        request=request, prompt=plain.prompt, params=plain.params, max_tokens=plain.max_tokens, grammar=text
    )


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    channel = run(
        [VOCABULARY_MESSAGE, follow(0, "nonsense"), follow(1, grammar("abc")), submission(2, [1])], requests=3
    )
    assert channel.finishes.pop(0) == "error"
    assert channel.finishes.keys() == {1, 2}
    assert text_of(channel.tokens[1]) == "abc"


def test_a_request_can_leave_while_its_grammar_is_compiled() -> None:
    channel = run([VOCABULARY_MESSAGE], [follow(0, grammar("(ab)+")), Abort(request=0)], requests=1)
    assert channel.finishes == {0: "abort"}
    assert not channel.tokens


def test_a_request_can_be_paused_and_resumed_while_its_grammar_is_compiled() -> None:
    request = msgspec.structs.replace(follow(0, grammar("(ab)+")), paused=True)
    other = follow(1, grammar("abc"))
    pause, resume = (Pause(request=number, paused=number == 1) for number in (1, 0))
    later = [[], [], [], [Abort(request=1)]]
    channel = run([VOCABULARY_MESSAGE], [request, other, pause, resume], *later, requests=2)
    assert channel.tokens == {0: alone(request)}
    assert channel.finishes[1] == "abort"


def test_a_grammar_before_the_vocabulary_is_a_fault_of_the_server() -> None:
    with pytest.raises(ValueError, match="before the vocabulary"):
        run([follow(0, grammar("abc"))], requests=1)


def test_a_mask_that_takes_long_holds_up_only_its_own_request() -> None:
    request = follow(0, grammar("(ab|cd)*j"), max_tokens=9)
    runner, go_on = CheckingRunner(), threading.Event()

    class Blocking(Lines):
        """Keeps all threads busy from the third turn on until the other request has ended."""

        def receive(self, block: bool) -> list[ToEngine]:
            if self.turn == 3:
                threads = engine._intake._grammars.threads  # type: ignore[union-attr]
                for _ in range(threads._max_workers):
                    threads.submit(go_on.wait)
            return super().receive(block)

        def send(self, message: StepReport) -> None:
            super().send(message)
            if 1 in self.finishes and not go_on.is_set():
                assert 0 not in self.finishes
                go_on.set()

    other = submission(1, [4, 5], max_tokens=12, params=SamplingParams(temperature=0, ignore_eos=True))
    channel = Blocking([(1, VOCABULARY_MESSAGE), (2, request), (3, other)], 2)
    engine = Engine(runner.scheduler, runner, channel)
    engine.run()
    assert channel.finishes[1] == "length"
    assert channel.tokens[0] == alone(request)


def test_a_model_without_an_end_of_sequence_token_serves_what_follows_no_grammar() -> None:
    runner = CheckingRunner()
    endless = Vocabulary(tokens=VOCABULARY_MESSAGE.tokens, special=(), eos_ids=())
    channel = Lines([(1, endless), (2, submission(0, [4, 5], max_tokens=3, params=SamplingParams(temperature=0)))], 1)
    Engine(runner.scheduler, runner, channel).run()
    assert channel.finishes == {0: "length"}


def test_a_state_follows_from_the_grammar_and_the_tokens_alone() -> None:
    grammars = Grammars(VOCABULARY_MESSAGE)
    output = alone(follow(0, grammar("[0-9]{3}: [a-j]+"), max_tokens=9))[:5]
    step_by_step = GrammarState(grammars, grammar("[0-9]{3}: [a-j]+"))
    masks = [step_by_step.mask()]
    for token in output:
        step_by_step.take(token)
        masks.append(step_by_step.mask())
    for count, mask in enumerate(masks):
        assert GrammarState(grammars, grammar("[0-9]{3}: [a-j]+"), output[:count]).mask() == mask


def test_a_request_goes_on_behind_what_an_earlier_engine_has_emitted() -> None:
    request = follow(0, grammar("[0-9]{3}: [a-j]+"), max_tokens=12)
    whole = alone(request)
    for count in range(1, len(whole)):
        resumed = msgspec.structs.replace(request, emitted=tuple(whole[:count]))
        assert run([VOCABULARY_MESSAGE], [resumed], requests=1).tokens[0] == whole[count:]


def test_after_a_token_that_was_not_allowed_nothing_is() -> None:
    state = GrammarState(Grammars(VOCABULARY_MESSAGE), grammar("abc"))
    assert state.failure is None
    state.take(PIECES.index(b"7"))
    assert not any(state.mask())
    assert state.failure is not None
    assert "\n" not in state.failure
