"""Programs that some tests need beside Python packages."""

import os

import pytest

REQUIRED = os.environ.pop("OCTAVO_REQUIRE_ALL", "") == "1"
"""Taken out of the environment, because Octavo refuses variables that it does not know."""


def need(found: object, what: str) -> None:
    """Skip the test where something is not found; fail where OCTAVO_REQUIRE_ALL=1 says that all must be there."""
    if not found:
        (pytest.fail if REQUIRED else pytest.skip)(f"{what} is not installed")
