from collections.abc import Iterator

import pytest
from support.live import Live, live_server, story_command

from octavo.model.weights.locate import locate
from octavo.server.tokenizer_files import load_tokenizer

TALES = {
    "plain": "Once upon a time there was a queen. She counted: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and stopped.",
    "emoji": "A chilli 🌶ďáb, a family 👩‍👩‍👧‍👦, 你好世界, naïve café, e\u0301 and 🇫🇷!",
    "stops": "Thought: dolor sit amet\nObservation: it ambles. ABCDEFGHIJ",
}


@pytest.fixture(scope="session")
def stories() -> dict[str, tuple[int, list[int], str]]:
    """By name: the marker token that starts a story, the tokens that follow it, and their text."""
    tokenizer = load_tokenizer(locate("smollm2"))
    return {
        name: (1000 + index, tokenizer.encode(text, add_special_tokens=False), text)
        for index, (name, text) in enumerate(TALES.items())
    }


@pytest.fixture(scope="session")
def live(stories: dict[str, tuple[int, list[int], str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with the real tokenizer around an engine that tells the stories."""
    told = {marker: [marker, *tokens] for marker, tokens, _ in stories.values()}
    with live_server(command=story_command(tmp_path_factory.mktemp("stories"), told)) as server:
        yield server
        assert server.service.client.live == 0
