import asyncio
import gc
import sys
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from support.vocabularies import smollm2

from octavo.scheduler.messages import TokenEvent
from octavo.server.answer import ChatWriter, CompletionWriter, Head, Shown
from octavo.server.choice import Choice, Delta, interleave
from octavo.server.prepare import Prepared, SamplingParams
from octavo.server.protocol import SamplingFields
from octavo.server.stream import event
from octavo.server.text import TextStream


class Failing:
    async def deltas(self) -> AsyncGenerator[Delta]:
        yield Delta("a")
        raise ValueError("not an error anybody foresaw")


class Silent:
    def __init__(self) -> None:
        self.ended = False

    async def deltas(self) -> AsyncGenerator[Delta]:
        try:
            await asyncio.Event().wait()
            yield Delta()
        finally:
            self.ended = True


@pytest.mark.parametrize("others", [0, 1, 3])
def test_an_unforeseen_error_in_one_choice_ends_them_all(others: int) -> None:
    silent = [Silent() for _ in range(others)]

    async def read() -> None:
        async for _ in interleave([Failing(), *silent]):
            pass

    with pytest.raises(ValueError, match="foresaw"):
        asyncio.run(asyncio.wait_for(read(), 10))
    assert all(choice.ended for choice in silent)


class Endless:
    """A generation that yields one token after another, and notes how much was called and sent for each."""

    def __init__(self, token: int, count: int) -> None:
        self.token = token
        self.count = count
        self.calls: list[int] = []
        self._called = 0

    def profile(self, frame: object, kind: str, argument: object) -> None:
        self._called += kind in ("call", "c_call")

    async def events(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        for number in range(self.count):
            self._called = 0
            yield (TokenEvent(request=1, token=self.token, finish="length" if number == self.count - 1 else None),)
            self.calls.append(self._called)

    def __aiter__(self) -> AsyncIterator[tuple[TokenEvent, ...]]:
        return self.events()

    def abort(self, reason: str = "abort") -> None:
        pass


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
def test_what_a_token_costs_does_not_grow_with_the_text(kind: type[ChatWriter | CompletionWriter]) -> None:
    tokenizer = smollm2()
    (token,) = tokenizer.encode(" word", add_special_tokens=False)
    generation = Endless(token, 2000)
    text = TextStream(tokenizer, ["word wor!", "\n\n"], continuing=True)
    choice = Choice(0, generation, text, show_stop_ids=False)  # type: ignore[arg-type]
    prepared = Prepared(((1,),), 1, (2000,), 0, (SamplingParams(),), b"")
    request = SamplingFields(model="m", return_token_ids=True, stream_options={"include_usage": True})
    shown = Shown.of(request, tokenizer, None)
    writer = kind(Head("m", "fp", "id"), prepared, shown)
    sizes: list[int] = []

    async def read() -> None:
        sizes.extend([len(event(chunk)) async for chunk in writer.events([choice])])

    gc.disable()  # libraries call functions of theirs when it collects
    sys.setprofile(generation.profile)
    try:
        asyncio.run(read())
    finally:
        sys.setprofile(None)
        gc.enable()
    assert len(generation.calls) >= 1999
    early, late = generation.calls[100:200], generation.calls[1800:1900]
    assert min(early) > 10, "the work is counted at all"
    assert sum(late) == sum(early)
    assert max(sizes[1800:1900]) == max(sizes[100:200])
