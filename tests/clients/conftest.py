from collections.abc import Iterator

import pytest
from support.live import Live, live_server

from octavo.scheduler.messages import EngineConfig


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """The default model."""
    with live_server(EngineConfig(model="smollm2", max_model_len=2048)) as server:
        yield server
