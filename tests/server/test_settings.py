import argparse
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from octavo.scheduler.messages import EngineConfig
from octavo.server.flags import add_arguments, resolve
from octavo.server.settings import SETTINGS, ServerSettings, Settings
from octavo.server.values import OptionError

GIVEN = {
    "model": ("some/model", "some/model"),
    "load_format": ("gguf", "gguf"),
    "dtype": ("float32", "float32"),
    "max_model_len": ("8k", 8192),
    "max_tokens_policy": ("clamp", "clamp"),
    "seed": ("7", 7),
    "host": ("0.0.0.0", "0.0.0.0"),  # noqa: S104
    "port": ("0", 0),
    "served_model_name": ("a", ("a",)),
    "max_body_bytes": ("1.5M", 3 << 19),
    "max_queued_requests": ("0", 0),
    "max_queued_tokens": ("64k", 65_536),
    "api_key": ("secret", ("secret",)),
    "metrics_key": ("secret", "secret"),
    "cors_origin": ("https://example.org", ("https://example.org",)),
    "shutdown_timeout": ("2.5", 2.5),
    "stall_timeout": ("45", 45.0),
    "queue_timeout": ("9", 9.0),
    "request_timeout": ("90", 90.0),
    "receive_timeout": ("7", 7.0),
    "send_timeout": ("8", 8.0),
    "max_connections": ("99", 99),
    "log_level": ("debug", "debug"),
    "tool_call_parser": ("mistral", "mistral"),
    "log_format": ("json", "json"),
    "otlp_traces_endpoint": ("http://collector:4318/v1/traces", "http://collector:4318/v1/traces"),
    "quantization": ("fp8", "fp8"),
    "kv_cache_dtype": ("fp8_e4m3", "fp8_e4m3"),
    "device": ("cpu", "cpu"),
    "tensor_parallel_size": ("2", 2),
    "attention_prefill": ("fa3", "fa3"),
    "attention_decode": ("xqa", "xqa"),
    "max_num_seqs": ("3", 3),
    "max_num_batched_tokens": ("1k", 1024),
    "block_size": ("32", 32),
    "kv_blocks": ("100", 100),
    "memory": ("16GiB", 16 << 30),
    "gpu_memory_utilization": ("0.85", 0.85),
    "admission": ("reserve", "reserve"),
}
"""For every setting that takes free or listed text: one way to write it and what that means."""


def settings(arguments: list[str], environment: Mapping[str, str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return resolve(vars(parser.parse_args(arguments)), environment or {})


def value(resolved: Settings, name: str) -> object:
    return getattr(resolved.server if hasattr(resolved.server, name) else resolved.engine, name)


def arguments_for(name: str, text: str) -> list[str]:
    return [text] if name == "model" else ["--" + name.replace("_", "-"), text]


def test_every_setting_fills_one_field_and_every_field_has_a_setting() -> None:
    names = {setting.name for setting in SETTINGS}
    filled = {field.name for field in fields(ServerSettings)} | set(EngineConfig.__struct_fields__)
    assert names == filled | {"enable_faults"}  # which only allows another
    assert len(names) == len(SETTINGS) <= 60
    assert names == set(GIVEN) | {
        "chat_template",
        "ssl_certfile",
        "ssl_keyfile",
        "prefix_caching",
        "enforce_eager",
        "api_key_file",
        "metrics_open",
        "page",
        "use_model_sampling_defaults",
        "enable_faults",
        "fault",
    }


def test_defaults_agree_with_the_engines_own() -> None:
    assert settings([]).engine == EngineConfig(model="smollm2")
    assert settings([]).server == ServerSettings(
        host="127.0.0.1",
        port=8000,
        served_model_name=("smollm2",),
        max_tokens_policy="auto",
        use_model_sampling_defaults=False,
        chat_template=None,
        tool_call_parser="auto",
        max_body_bytes=4 << 20,
        max_queued_requests=1024,
        max_queued_tokens=1 << 20,
        api_key=(),
        api_key_file=(),
        metrics_open=False,
        metrics_key=None,
        cors_origin=(),
        page=True,
        shutdown_timeout=30.0,
        stall_timeout=300.0,
        ssl_certfile=None,
        ssl_keyfile=None,
        queue_timeout=300.0,
        request_timeout=3600.0,
        receive_timeout=30.0,
        send_timeout=30.0,
        max_connections=2048,
        log_level="info",
        log_format="text",
        otlp_traces_endpoint=None,
    )
    assert not settings([]).changed


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_wins_over_a_variable_which_wins_over_the_default(name: str) -> None:
    text, meaning = GIVEN[name]
    variable = "OCTAVO_" + name.upper()
    assert value(settings([]), name) != meaning
    assert value(settings(arguments_for(name, text)), name) == meaning
    assert value(settings([], {variable: text}), name) == meaning
    assert value(settings(arguments_for(name, text), {variable: "\0 nonsense"}), name) == meaning
    assert value(settings([], {variable: ""}), name) == value(settings([]), name)


def test_prefix_caching_can_be_turned_off_in_three_ways() -> None:
    assert settings([]).engine.prefix_caching
    assert not settings(["--no-prefix-caching"]).engine.prefix_caching
    assert not settings([], {"OCTAVO_PREFIX_CACHING": "0"}).engine.prefix_caching
    assert not settings([], {"OCTAVO_NO_PREFIX_CACHING": "1"}).engine.prefix_caching
    assert settings([], {"OCTAVO_NO_PREFIX_CACHING": "0"}).engine.prefix_caching
    assert settings(["--prefix-caching"], {"OCTAVO_PREFIX_CACHING": "0"}).engine.prefix_caching
    with pytest.raises(OptionError, match="OCTAVO_PREFIX_CACHING and OCTAVO_NO_PREFIX_CACHING"):
        settings([], {"OCTAVO_NO_PREFIX_CACHING": "1", "OCTAVO_PREFIX_CACHING": "1"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("load_format", "bin"),
        ("dtype", "int8"),
        ("max_model_len", "8q"),
        ("max_model_len", "0"),
        ("max_model_len", "-5"),
        ("max_model_len", "9999999k"),
        ("seed", "x"),
        ("host", " "),
        ("port", "65536"),
        ("port", "http"),
        ("served_model_name", ""),
        ("max_body_bytes", "0"),
        ("max_body_bytes", "4 XB"),
        ("shutdown_timeout", "forever"),
        ("shutdown_timeout", "-1"),
        ("shutdown_timeout", "nan"),
        ("log_level", "loud"),
        ("device", "tpu"),
        ("max_num_seqs", "0"),
        ("block_size", "257"),
        ("memory", "-1G"),
        ("gpu_memory_utilization", "0"),
        ("gpu_memory_utilization", "1.01"),
        ("gpu_memory_utilization", "90"),
        ("gpu_memory_utilization", "."),
        ("gpu_memory_utilization", "nan"),
        ("admission", "greedy"),
        ("max_tokens_policy", "loose"),
        ("chat_template", "/no/such/file"),
        ("cors_origin", "example.org"),
        ("cors_origin", "https://example.org/page"),
        ("cors_origin", "null"),
        ("fault", "meteor"),
        ("fault", "step-raises:token"),
        ("fault", "step-raises:token=x"),
        ("fault", "step-raises:colour=1"),
        ("fault", "step-raises:every=0"),
    ],
)
def test_a_bad_value_is_refused_by_the_name_it_was_given_under(name: str, text: str) -> None:
    with pytest.raises(OptionError) as raised:
        settings([f"--{name.replace('_', '-')}={text}"])
    assert str(raised.value).startswith(f"--{name.replace('_', '-')}: {text!r}: ")
    assert raised.value.exit_code == 64
    if text:
        with pytest.raises(OptionError, match="^OCTAVO_" + name.upper()):
            settings([], {"OCTAVO_" + name.upper(): text})


def test_faults_are_refused_unless_they_are_enabled() -> None:
    for given in ({"OCTAVO_FAULT": "step-hangs"}, {"OCTAVO_FAULT": "step-hangs", "OCTAVO_ENABLE_FAULTS": "0"}):
        with pytest.raises(OptionError, match="--enable-faults"):
            settings([], given)
    faults = ("step-raises:token=7", "engine-killed:step=3:life=0")
    for arguments, variables in ((["--enable-faults"], {}), ([], {"OCTAVO_ENABLE_FAULTS": "1"})):
        assert settings(arguments, variables | {"OCTAVO_FAULT": ",".join(faults)}).engine.fault == faults


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(OptionError, match=r"^OCTAVO_MAX_MODEL_LENGTH: .*OCTAVO_MAX_MODEL_LEN$"):
        settings([], {"OCTAVO_MAX_MODEL_LENGTH": "1"})
    settings([], {"OCTAVO_KERNELS": "torch", "OCTAVO_CACHE_DIR": "/tmp", "PATH": "x", "octavo_port": "x"})  # noqa: S108


def test_a_kubernetes_service_link_is_recognised() -> None:
    with pytest.raises(OptionError, match=r"OCTAVO_PORT.*enableServiceLinks"):
        settings([], {"OCTAVO_PORT": "tcp://10.0.0.1:8000"})


def test_names_can_be_several_and_default_to_the_model_without_its_path(tmp_path: Path) -> None:
    assert settings(["--served-model-name", "a", "--served-model-name", "b"]).server.served_model_name == ("a", "b")
    assert settings([], {"OCTAVO_SERVED_MODEL_NAME": "a, b,a"}).server.served_model_name == ("a", "b")
    assert settings(["owner/name"]).server.served_model_name == ("owner/name",)
    model = tmp_path / "my-model.gguf"
    model.touch()
    assert settings([str(model)]).server.served_model_name == ("my-model.gguf",)
    assert settings(["/not/there/model"]).server.served_model_name == ("model",)


def test_only_settings_that_differ_from_their_default_count_as_changed() -> None:
    changed = settings(["--port", "8000", "--memory", "1G", "--no-prefix-caching"], {"OCTAVO_HOST": "::1"}).changed
    assert changed == {"--memory": str(1 << 30), "--prefix-caching": "no", "--host": "::1"}


def test_keys_come_from_flags_variables_and_files_and_are_shown_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who has them\n\nfirst\n  second  \n")
    resolved = settings(["--api-key", "third", "--api-key-file", str(path), "--metrics-key", "fourth"])
    assert resolved.server.api_key == ("third",)
    assert resolved.server.api_key_file == ("first", "second")
    assert settings([], {"OCTAVO_API_KEY": "a,b"}).server.api_key == ("a", "b")
    assert set(resolved.changed.values()) == {"***"}
    path.write_text("# none\n")
    for name, problem in ((str(path), "no key in this file"), ("/no/such/file", "no such file")):
        with pytest.raises(OptionError, match=f"^--api-key-file: there is {problem}$"):
            settings(["--api-key-file", name])
    path.write_bytes(b"\xff")
    with pytest.raises(OptionError, match="UTF-8"):
        settings(["--api-key-file", str(path)])
    with pytest.raises(OptionError, match=r"^--api-key: must not be empty$"):
        settings(["--api-key", " "])
