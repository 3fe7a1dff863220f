"""Exits with 0 if the server in this container is ready. The image's health check; Kubernetes asks over HTTP itself."""

import os
import ssl
import sys
import urllib.error
import urllib.request


def is_ready(scheme: str, port: str) -> bool:
    """Ask /health/ready. The certificate is not for this address, and need not be: we ask ourselves."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        url = f"{scheme}://127.0.0.1:{port}/health/ready"
        with urllib.request.urlopen(url, timeout=4, context=context) as response:  # noqa: S310
            return bool(response.status == 200)
    except OSError:  # refused, timed out, or a status that says no
        return False


if __name__ == "__main__":
    https = os.environ.get("OCTAVO_SSL_CERTFILE")
    sys.exit(0 if is_ready("https" if https else "http", os.environ.get("OCTAVO_PORT") or "8000") else 1)
