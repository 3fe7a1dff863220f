"""docker compose's own reading of the files, and what must agree between them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from octavo.server.settings import FOREIGN_VARIABLES, SETTINGS

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = Path(sys.executable).parent / "docker-compose"
VARIABLES = {setting.variable for setting in SETTINGS} | FOREIGN_VARIABLES
OCTAVOS = ("octavo", "replica-0", "replica-1")
PROFILES = ((), ("monitoring",), ("replicas",), ("monitoring", "replicas"))


def config(*profiles: str, cpu: bool = False, **variables: str) -> dict:
    files = ["docker-compose.yml", *(["docker-compose.cpu.yml"] if cpu else [])]
    arguments = [argument for file in files for argument in ("-f", str(DEPLOY / file))]
    arguments += [argument for profile in profiles for argument in ("--profile", profile)]
    command = [str(COMPOSE), *arguments, "config", "--format", "json"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration[:-1])


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("profiles", PROFILES)
def test_compose_accepts_every_combination(profiles: tuple[str, ...], cpu: bool) -> None:
    services = set(config(*profiles, cpu=cpu)["services"])
    expected = {"octavo"}
    expected |= {"prometheus", "grafana"} if "monitoring" in profiles else set()
    expected |= {"router", "replica-0", "replica-1"} if "replicas" in profiles else set()
    assert services == expected


def test_each_octavo_has_a_gpu_of_its_own_and_on_a_cpu_none() -> None:
    services = config("replicas")["services"]
    devices = [services[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in OCTAVOS]
    assert all(device["driver"] == "nvidia" and device["capabilities"] == ["gpu"] for device in devices)
    assert [device["device_ids"] for device in devices] == [["0"], ["0"], ["1"]]
    for name in OCTAVOS:
        service = config("replicas", cpu=True)["services"][name]
        assert "devices" not in json.dumps(service.get("deploy"))
        assert service["build"]["args"] == {"DEVICE": "cpu"}
        assert service["image"] == "octavo:cpu"


@pytest.mark.parametrize("name", OCTAVOS)
def test_an_octavo_is_locked_down_and_has_time_to_drain(name: str) -> None:
    service = config("replicas", MODEL="/models/llama")["services"][name]
    assert service["command"] == ["/models/llama"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["ulimits"]["nofile"] == 65536
    drain = float(service["environment"]["OCTAVO_SHUTDOWN_TIMEOUT"])
    assert drain < seconds(service["stop_grace_period"]) <= drain + 10
    settings = {variable for variable in service["environment"] if variable.startswith("OCTAVO_")}
    assert settings <= VARIABLES
    [secret] = service["secrets"]
    assert service["environment"]["OCTAVO_API_KEY_FILE"] == secret["target"]
    assert {volume["target"] for volume in service["volumes"]} == {"/cache", "/models"}


def test_the_router_knows_the_replicas_and_waits_until_they_are_ready() -> None:
    router = config("replicas")["services"]["router"]
    replicas = [name for name in OCTAVOS if name.startswith("replica")]
    workers = router["command"][router["command"].index("--worker-urls") + 1 :]
    assert workers == [f"http://{name}:8000" for name in replicas]
    assert {name: wait["condition"] for name, wait in router["depends_on"].items()} == dict.fromkeys(
        replicas, "service_healthy"
    )


def test_prometheus_finds_every_octavo_and_has_the_key() -> None:
    services = config("monitoring", "replicas")["services"]
    [job] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    [name] = job["dns_sd_configs"][0]["names"]
    assert all(name in services[octavo]["networks"]["default"]["aliases"] for octavo in OCTAVOS)
    [port] = services["octavo"]["ports"]
    assert port["target"] == job["dns_sd_configs"][0]["port"]
    assert port["host_ip"] == "127.0.0.1"
    [secret] = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == secret["target"]


def test_grafana_is_given_what_is_provisioned() -> None:
    grafana = config("monitoring")["services"]["grafana"]
    mounts = {volume["target"]: volume["source"] for volume in grafana["volumes"]}
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/octavo.yml").read_text())["providers"]
    dashboards = Path(mounts[provider["options"]["path"]])
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (dashboards / home.name).exists()
    assert not any("PASSWORD" in variable for variable in grafana["environment"])


def test_images_have_versions_and_name_no_registry() -> None:
    for name, service in config("monitoring", "replicas")["services"].items():
        image, _, tag = service["image"].partition(":")
        assert tag not in ("", "latest"), name
        assert "." not in image.split("/")[0]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_what_is_mounted_from_the_repository_is_there(name: str) -> None:
    for volume in config("monitoring")["services"][name]["volumes"]:
        assert volume["type"] == "volume" or Path(volume["source"]).is_dir()
