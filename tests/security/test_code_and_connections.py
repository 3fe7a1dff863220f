"""Code that a client or a checkpoint brings never runs; nothing is connected to; one port is open."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.attacked import Attacked
from support.sockets import sockets_of

LOAD_STATE = [
    "/update_weights_from_tensor",
    "/load_lora_adapter_from_tensors",
    "/v1/load_lora_adapter",
    "/collective_rpc",
    "/v1/rerank",
    "/slots/0?action=restore",
    "/invocations",
    "/pause",
    "/debug/dumper",
]
CODE_FIELDS = {
    "custom_logit_processor": "gASVKAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjA10b3VjaCAvdG1wL3h4eJSFlFKULg==",
    "kv_transfer_params": {"remote_host": "169.254.169.254", "remote_port": 1},
    "mm_processor_kwargs": {"shm": "psm_1"},
    "rid": "a",
}


@pytest.mark.parametrize("path", LOAD_STATE)
def test_no_route_takes_state_or_code_cve_2026_86793_cve_2026_15969_cve_2026_43629_cve_2026_5760(
    attacked: Attacked, path: str
) -> None:
    for method in ("POST", "GET", "PUT"):
        assert httpx.request(method, attacked.url + path, json={}).status_code == 404


@pytest.mark.parametrize("field", CODE_FIELDS)
def test_fields_that_name_code_or_objects_do_nothing_cve_2026_7304_cve_2026_115912_cve_2026_112266(
    attacked: Attacked, field: str
) -> None:
    plain = attacked.post("/v1/completions", prompt=[9, 8, 7], seed=1).json()["choices"]
    given = attacked.post("/v1/completions", prompt=[9, 8, 7], seed=1, **{field: CODE_FIELDS[field]})
    assert given.json()["choices"] == plain


def test_embeddings_of_a_prompt_are_refused_cve_2025_62164(attacked: Attacked) -> None:
    refused = attacked.post("/v1/completions", prompt="a", prompt_embeds="UEsDBA==")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_embeds")


def test_nothing_is_connected_to_and_one_port_is_open_cve_2025_32444_cve_2026_34159_cve_2025_47277_cve_2026_24779(
    attacked: Attacked,
) -> None:
    """URLs in requests (CVE-2025-6242, CVE-2026-33626) are the usual way to make a server connect."""
    away = "http://169.254.169.254/"
    parts = [{"type": kind, kind: {"url": away}} for kind in ("image_url", "audio_url", "video_url", "file")]
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": away}}}
    user = [{"role": "user", "content": "a"}]
    for part in parts:
        assert attacked.post("/v1/chat/completions", messages=[{"role": "user", "content": [part]}]).status_code == 400
    assert attacked.post("/v1/chat/completions", messages=user, response_format=schema).status_code == 400
    port = int(attacked.url.rpartition(":")[2])
    with httpx.Client() as client:
        client.get(attacked.url + "/health", headers={"x-request-id": away, "forwarded": f"host={away}"})
        sockets = sockets_of(attacked.daemon.process.pid)
    assert sockets.listening == [port]
    assert set(sockets.connected) <= {port}  # those of clients
    assert attacked.answers()
    assert attacked.socket_events() == []


def test_the_audit_hook_notices_a_connection(attacked: Attacked, tmp_path: Path) -> None:
    """Without it, an empty record would prove nothing."""
    record = tmp_path / "record"
    script = "import socket; socket.socket(socket.AF_INET).connect_ex(('127.0.0.1', 9))"
    environment = {
        **os.environ,
        "AUDIT_RECORD": str(record),
        "PYTHONPATH": f"{attacked.record.parent}:{os.environ.get('PYTHONPATH', '')}",
    }
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
    assert "socket.connect" in record.read_text()
