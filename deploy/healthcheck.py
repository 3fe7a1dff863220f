"""Exits with 0 if the server in this container is ready. The image's health check; Kubernetes asks over HTTP itself."""

import os
import sys
import urllib.error
import urllib.request


def is_ready(port: str) -> bool:
    """Ask /health/ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=4) as response:
            return bool(response.status == 200)
    except OSError:  # refused, timed out, or a status that says no
        return False


if __name__ == "__main__":
    sys.exit(0 if is_ready(os.environ.get("OCTAVO_PORT") or "8000") else 1)
