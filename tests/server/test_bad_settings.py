"""What an operator may get wrong: one line that names it, and a documented exit code."""

import subprocess
from pathlib import Path

import httpx
import pytest
from support.daemon import running
from support.octavo_command import octavo, only_error

from octavo.server.flags import resolve
from octavo.server.listening import check_certificate
from octavo.server.values import OptionError


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("certificate")
    chain, key = directory / "chain.pem", directory / "key.pem"
    command = ["/usr/bin/env", "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *name, "-out", chain, "-keyout", key], check=True, capture_output=True)
    return chain, key


def test_a_certificate_needs_a_key_and_a_key_a_certificate(certificate: tuple[Path, Path]) -> None:
    chain, key = map(str, certificate)
    result = octavo("serve", "--ssl-certfile", chain)
    assert result.returncode == 64
    problem = "is missing: HTTPS needs a certificate and its private key"
    assert only_error(result) == f"octavo: error: --ssl-keyfile {problem}"
    with pytest.raises(OptionError, match=f"^--ssl-certfile {problem}$"):
        check_certificate(resolve({"ssl_keyfile": key}, {}).server)


def test_files_that_are_no_certificate_and_key_are_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    chain, key = map(str, certificate)
    other = tmp_path / "other.pem"
    other.write_text("nothing of the kind")
    for file, secret in ((str(other), key), (chain, str(other)), (key, chain)):
        with pytest.raises(OptionError, match=r"^--ssl-certfile, --ssl-keyfile: not a certificate .*[^\n]$"):
            check_certificate(resolve({"ssl_certfile": file, "ssl_keyfile": secret}, {}).server)


def test_with_certificate_and_key_the_server_speaks_https(certificate: tuple[Path, Path]) -> None:
    chain, key = certificate
    with running("--ssl-certfile", str(chain), "--ssl-keyfile", str(key)) as daemon:
        assert daemon.url.startswith("https://127.0.0.1:")
        import ssl

        context = ssl.create_default_context(cafile=str(chain))
        assert httpx.get(f"{daemon.url}/health/ready", verify=context).json() == {"status": "ok"}


def test_a_cache_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = octavo("serve", "--port", "0", OCTAVO_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert result.returncode == 64
    assert only_error(result).startswith(f"octavo: error: OCTAVO_CACHE_DIR: {tmp_path}/file/cache cannot be written to")


def test_an_endpoint_for_traces_is_an_address() -> None:
    result = octavo("serve", "--otlp-traces-endpoint", "collector:4318")
    assert result.returncode == 64
    assert "--otlp-traces-endpoint" in only_error(result)
