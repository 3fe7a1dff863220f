"""What errors, headers and logs give away, and what can be written into them."""

import json
import re
import time

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.attacked import Attacked
from support.live import NO_TLS
from support.raw import exchange, status_of

LEAK = re.compile(r"0x[0-9a-fA-F]{6,}|Traceback|File \"|/(usr|root|home|tmp|opt|etc|proc)/|site-packages|\bat line\b")

ROUTES = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
]
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
NAMES = [
    "prompt", "messages", "input", "tokens", "stop", "n", "logit_bias", "response_format", "tools", "seed",
    "tool_choice", "structured_outputs", "chat_template_kwargs", "stream_options", "system", "text", "max_tokens",
    "temperature",
]  # fmt: skip


def safe(response: httpx.Response, own: str = "") -> bool:
    """Whether an answer is no fault of the server and gives nothing away. own: what it repeats of the client's."""
    return response.status_code not in (500, 502) and not LEAK.search(response.text.replace(own, ""))


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(route=st.sampled_from(ROUTES), fields=st.dictionaries(st.sampled_from(NAMES), values, max_size=4))
@example("/v1/completions", {"prompt": "\ud800"})
@example("/v1/chat/completions", {"messages": [{"role": "user", "content": "\udfff\x00"}]})
@example("/v1/chat/completions", {"messages": [{"role": "\u202euser", "content": None}]})
@example("/v1/completions", {"prompt": [10**4000]})
@example("/detokenize", {"tokens": [-1, 2**63]})
def test_errors_tell_no_address_path_or_traceback_cve_2026_22778_cve_2026_54236(
    attacked: Attacked, route: str, fields: dict[str, object]
) -> None:
    body = json.dumps({"model": "smollm2", "max_tokens": 1, **fields}).encode()
    kind = {"content-type": "application/json"}
    response = httpx.post(attacked.url + route, content=body, headers=kind, timeout=60, verify=NO_TLS)
    assert safe(response), (response.status_code, response.text)


MODELS = [
    "../../etc/passwd",
    "/etc/passwd",
    "a\0b",
    "smollm2/../smollm2",
    "%2e%2e%2fetc%2fpasswd",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_name_is_never_a_path_cve_2024_37032_cve_2024_45436(attacked: Attacked, name: str) -> None:
    response = attacked.post("/v1/completions", model=name, prompt=[5])
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert safe(response, own=name)
    quoted = "".join(f"%{byte:02x}" for byte in name.encode())
    assert httpx.get(f"{attacked.url}/v1/models/{quoted}").status_code == 404


IDENTITIES = [b"a\x00b", b"a\x0bERROR forged", b"\xff\xfe", b"a" * 9000, b"\x1b[2J", b"169.254.169.254/%0aERROR"]


@pytest.mark.parametrize("identity", IDENTITIES)
def test_no_client_writes_lines_of_the_log_pysec_2026_4198_cve_2026_116176(attacked: Attacked, identity: bytes) -> None:
    """Neither through the id of a request nor through a path, which the access log holds."""
    before = len(attacked.daemon.log)
    body = b'{"model": "smollm2", "prompt": [5], "max_tokens": 1}'
    head = b"Host: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    answer = exchange(
        attacked.url,
        b"POST /v1/completions?%0aERROR HTTP/1.1\r\n" + head + b"X-Request-Id: " + identity + b"\r\n\r\n" + body,
    )
    assert status_of(answer) in (200, 400)
    assert identity not in answer
    for target in (b"/%0d%0aERROR%20forged", b"/\x1b[2J", b"/%1b[2J%0a"):
        exchange(attacked.url, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert httpx.get(f"{attacked.url}/the-last-of-{len(identity)}").status_code == 404
    while not any(f"/the-last-of-{len(identity)}" in line for line in attacked.daemon.log[before:]):
        time.sleep(0.01)
    for line in attacked.daemon.log[before:]:
        assert re.match(r"\S+ \S+ |\{", line), line
        assert not line.startswith(("ERROR forged", "ERROR%"))
        assert line.rstrip("\n").isprintable(), line


def test_paths_and_methods_make_no_series_pysec_2026_4325(attacked: Attacked) -> None:
    def series() -> int:
        lines = httpx.get(attacked.url + "/metrics").text.splitlines()
        return sum(not line.startswith("#") for line in lines)

    httpx.get(attacked.url + "/none")
    before = series()
    with httpx.Client() as client:
        for number in range(300):
            client.request(f"M{number:x}", f"{attacked.url}/v1/{number}")
            client.post(attacked.url + "/v1/completions", json={"model": f"m{number}", "prompt": "a"})
    assert series() == before


def test_files_are_not_served_cve_2025_62727(attacked: Attacked) -> None:
    """`Range` counts only where files are served; a path above the root is no route."""
    ranges = {"range": "bytes=" + ",".join(f"{i}-{i + 1}" for i in range(3000))}
    page = httpx.get(attacked.url + "/", headers=ranges)
    assert page.status_code == 200
    for path in ("/../../etc/passwd", "/page.html/..%2f..%2fetc/passwd", "/static/../app.py"):
        answer = exchange(attacked.url, b"GET " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert status_of(answer) == 404


def test_half_a_surrogate_pair_within_the_arguments_of_a_call_is_refused(attacked: Attacked) -> None:
    """Arguments are JSON within JSON: what the body's own parser refuses can hide there."""
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", "function": function}]}
    refused = attacked.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}, call])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
