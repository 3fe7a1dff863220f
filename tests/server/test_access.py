"""Keys and Host headers: everything is closed but /health, whatever a client calls itself or the server."""

import hmac
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from fastapi.routing import APIRoute
from starlette.routing import Route
from support.live import Live, live_server, story_command
from support.raw import exchange, get, status_of

from octavo.server import access
from octavo.server.access import AccessRules
from octavo.server.app import create_app

KEY = "sk-correct-horse"
OTHER_KEY = "sk-battery-staple"
METRICS_KEY = "scrape"
OPEN = {"/health", "/health/live", "/health/ready", "/health/startup"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    command = story_command(tmp_path_factory.mktemp("locked"), {})
    rules = AccessRules((KEY, OTHER_KEY), metrics_key=METRICS_KEY)
    with live_server(command=command, rules=rules, origins=("https://example.org",)) as server:
        yield server


def routes(live: Live) -> list[tuple[str, str]]:
    """Every method and path that the application answers."""
    found = []
    for route in create_app(live.service).routes:
        assert isinstance(route, Route | APIRoute), "a mount would hide routes from this walk"
        path = re.sub(r"\{.*?\}", "smollm2", route.path)
        found += [(method, path) for method in route.methods or ()]
    return found


def test_a28_every_route_but_health_needs_a_key(locked: Live) -> None:
    walked = routes(locked)
    assert len(walked) >= 9
    for method, path in walked:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"Authorization": KEY}):
            response = httpx.request(method, locked.url + path, headers=headers)
            if path in OPEN:
                assert response.status_code == 200, (method, path)
            else:
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    error = response.json()["error"]
                    own = error["type"] if path.startswith("/v1/messages") else error["code"]
                    assert own in {"authentication_error", "invalid_api_key"}
    assert httpx.get(locked.url + "/health").status_code == 200


def test_a28_paths_that_are_no_routes_need_a_key_too(locked: Live) -> None:
    for path in ("/nowhere", "/healthy", "/HEALTH", "//health", "/v1/models/", "/docs", "/metrics/", "/", "/v1"):
        assert httpx.get(locked.url + path).status_code == 401, path
    for path in ("/health/../v1/models", "/health/%2e%2e/v1/models", "/health/x"):
        response = exchange(locked.url, get(path, "Host: a"))
        assert status_of(response) == 404, path
        assert b"smollm2" not in response


def test_messages_are_refused_in_the_shape_of_their_own_api(locked: Live) -> None:
    error = httpx.post(f"{locked.url}/v1/messages", json={}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "authentication_error")


def test_each_key_opens_every_route(locked: Live) -> None:
    for headers in (
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer  {OTHER_KEY}"},
        {"x-api-key": KEY},
    ):
        for method, path in routes(locked):
            assert httpx.request(method, locked.url + path, headers=headers).status_code != 401, (method, path)


def test_the_metrics_key_opens_the_metrics_and_nothing_else(locked: Live) -> None:
    headers = {"Authorization": f"Bearer {METRICS_KEY}"}
    assert httpx.get(f"{locked.url}/metrics", headers=headers).status_code == 200
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 401


def test_two_credentials_are_none(locked: Live) -> None:
    request = get("/v1/models", "Host: a", "Authorization: Bearer wrong", f"Authorization: Bearer {KEY}")
    assert status_of(exchange(locked.url, request)) == 401
    request = get("/v1/models", "Host: a", "Authorization: Basic eDp5", f"x-api-key: {KEY}")
    assert status_of(exchange(locked.url, request)) == 401


@pytest.mark.parametrize(
    "host", ["x/?", "x/#", "x/health", "/health", "a@b", "a:b", "a:123456", "", "a b", "[::1", "é"]
)
def test_a_host_that_is_none_is_refused(locked: Live, host: str) -> None:
    for path in ("/v1/models", "/health"):
        response = exchange(locked.url, get(path, f"Host: {host}"))
        assert status_of(response) == 400, host
        assert b"smollm2" not in response


def test_a_missing_or_doubled_host_is_refused(locked: Live) -> None:
    assert status_of(exchange(locked.url, get("/health"))) == 400
    assert status_of(exchange(locked.url, get("/health", "Host: a", "Host: a"))) == 400
    assert status_of(exchange(locked.url, b"GET /health HTTP/1.0\r\n\r\n")) == 200
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "my_service.internal"):
        assert status_of(exchange(locked.url, get("/health", f"Host: {host}"))) == 200, host


def test_an_absolute_target_opens_nothing(locked: Live) -> None:
    for target in ("http://a/v1/models", "http://a/health?/v1/models", "http://a/v1/models#/health"):
        response = exchange(locked.url, get(target, "Host: a"))
        assert b"smollm2" not in response
    assert status_of(exchange(locked.url, get("http://a/v1/models", "Host: a"))) == 401


def test_the_key_is_compared_by_digests_without_an_early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[int, int]] = []
    original = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return original(one, other)

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    guard = AccessRules(("a", "b", "c"))
    for given in ("a", "c", "a" * 10_000, "x"):
        headers = [(b"authorization", b"Bearer " + given.encode())]
        assert guard._allows({"path": "/v1/models", "headers": headers}) is (given in ("a", "c"))
    assert compared == [(32, 32)] * 12


def test_metrics_can_be_opened_and_no_key_means_no_lock(tmp_path: Path) -> None:
    command = story_command(tmp_path, {})
    with live_server(command=command, rules=AccessRules((KEY,), metrics_open=True)) as live:
        assert httpx.get(f"{live.url}/metrics").status_code == 200
        assert httpx.get(f"{live.url}/v1/models").status_code == 401
    with live_server(command=command, rules=AccessRules(metrics_key=METRICS_KEY)) as live:
        assert httpx.get(f"{live.url}/metrics").status_code == 401
        assert httpx.get(f"{live.url}/v1/models").status_code == 200


def test_only_named_pages_may_call_from_a_browser(locked: Live, live: Live) -> None:
    asks = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    allowed = httpx.options(f"{locked.url}/v1/chat/completions", headers=asks)
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://example.org")
    other = httpx.options(f"{locked.url}/v1/chat/completions", headers=asks | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = httpx.get(f"{locked.url}/v1/models", headers={"Origin": "https://example.org"})
    assert refused.status_code == 401
    closed = httpx.get(f"{live.url}/v1/models", headers={"Origin": "https://example.org"})
    assert closed.status_code == 200
    assert not any(name.startswith("access-control") for name in closed.headers)


def test_the_official_client_raises_its_authentication_error(locked: Live) -> None:
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="API key"):
            client.models.list()
        assert client.with_options(api_key=KEY).models.list().data[0].id == "smollm2"
