"""Programs that some tests need beside Python packages, and ports for them to listen on."""

import os
import shutil
import socket

import pytest

REQUIRED = os.environ.pop("OCTAVO_REQUIRE_ALL", "") == "1"
"""Taken out of the environment, because Octavo refuses variables that it does not know."""


def need(found: object, what: str) -> None:
    """Skip the test where something is not found; fail where OCTAVO_REQUIRE_ALL=1 says that all must be there."""
    if not found:
        (pytest.fail if REQUIRED else pytest.skip)(f"{what} is not installed")


def tool(name: str, package: str) -> str:
    """The path of a program; without it the test is skipped, or fails where everything is required."""
    path = shutil.which(name)
    need(path, f"{name} (Debian package {package})")
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
