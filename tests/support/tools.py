"""Programs that some tests need, and ports for them to listen on."""

import shutil
import socket

from support.optional import need


def tool(name: str, package: str) -> str:
    """The path of a program; without it the test is skipped, or fails where everything is required."""
    path = shutil.which(name)
    need(path, f"{name} (Debian package {package})")
    return str(path)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
