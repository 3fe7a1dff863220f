"""The manifests against the schemas of Kubernetes, and against what the server does."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
import yaml
from support.live import Live, live_server, story_command
from support.measuring import scrape

from octavo.server.settings import SETTINGS

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS = [document for path in sorted(DIRECTORY.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(command=story_command(tmp_path_factory.mktemp("stories"), {})) as server:
        yield server


def manifest(kind: str) -> dict:
    [found] = [document for document in MANIFESTS if document["kind"] == kind]
    return found


def pod() -> dict:
    return manifest("Deployment")["spec"]["template"]


def container() -> dict:
    return pod()["spec"]["containers"][0]


@pytest.mark.parametrize(
    "document", [one for one in MANIFESTS if one["kind"] != "PodMonitor"], ids=lambda one: one["kind"]
)
def test_a_manifest_follows_the_schema_of_kubernetes(document: dict) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_everything_selects_the_same_pods() -> None:
    labels = pod()["metadata"]["labels"]
    assert manifest("Service")["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert manifest(kind)["spec"]["selector"]["matchLabels"] == labels
    target = manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifest("Deployment")["metadata"]["name"])
    assert "replicas" not in manifest("Deployment")["spec"], "or each apply would undo what the autoscaler did"


def test_ports_are_named_alike() -> None:
    [port] = container()["ports"]
    assert [one["targetPort"] for one in manifest("Service")["spec"]["ports"]] == [port["name"]]
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] == port["name"]
    assert all(container()[f"{probe}Probe"]["httpGet"]["port"] == port["name"] for probe in ("startup", "readiness"))


def test_the_probes_ask_for_what_they_are_for() -> None:
    for probe, path in (("startup", "/health/startup"), ("readiness", "/health/ready"), ("liveness", "/health/live")):
        assert container()[f"{probe}Probe"]["httpGet"]["path"] == path
    start = container()["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 30 * 60


def test_the_probes_and_the_scraped_path_are_answered(live: Live) -> None:
    paths = [container()[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")]
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    for path in (*paths, endpoint["path"]):
        assert httpx.get(live.url + path).status_code == 200


def test_the_autoscaler_reads_a_metric_that_is_exported(live: Live) -> None:
    [metric] = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"].removeprefix("octavo_") in scrape(live.url)


def test_a_pod_has_time_to_drain_and_may_write_nothing_but_volumes() -> None:
    spec = pod()["spec"]
    [timeout] = [setting.default for setting in SETTINGS if setting.name == "shutdown_timeout"]
    assert spec["terminationGracePeriodSeconds"] >= timeout + 5
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    assert {mount["name"] for mount in container()["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_its_variables_are_settings() -> None:
    names = {variable["name"] for variable in container()["env"]}
    assert names <= {setting.variable for setting in SETTINGS}


def test_the_monitor_presents_the_key_that_the_pod_asks_for() -> None:
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    [key] = [volume for volume in pod()["spec"]["volumes"] if "secret" in volume]
    assert credentials["name"] == key["secret"]["secretName"]
    [mount] = [mount for mount in container()["volumeMounts"] if mount["name"] == key["name"]]
    assert container()["env"][0]["value"] == f"{mount['mountPath']}/{credentials['key']}"
