import asyncio
from collections.abc import AsyncGenerator

import pytest

from octavo.server.choice import Delta, interleave


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
