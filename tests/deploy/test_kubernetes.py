"""The manifests against the schemas of Kubernetes, and against what the server does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import jsonschema
import kubernetes_validate
import pytest
import yaml
from support.live import Live, live_server, story_command
from support.measuring import scrape
from support.tools import free_port

from octavo.scheduler.launch import Launch, find_launch
from octavo.server.settings import SETTINGS

DIRECTORY = Path(__file__).parents[2] / "deploy" / "kubernetes"
MANIFESTS = [document for path in sorted(DIRECTORY.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]
CUSTOM = ("PodMonitor", "LeaderWorkerSet")
"""Kinds that Kubernetes does not have itself."""


def fields(required: str, optional: str = "", **own: dict) -> dict:
    """An object of these fields and no others; each is an object where `own` says nothing else."""
    allowed = {name: own.get(name, {"type": "object"}) for name in f"{required} {optional}".split()}
    return {"type": "object", "properties": allowed, "required": required.split(), "additionalProperties": False}


LEADER_WORKER_SET = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    spec=fields(
        "leaderWorkerTemplate",
        "replicas rolloutStrategy startupPolicy networkConfig",
        replicas={"type": "integer", "minimum": 0},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        leaderWorkerTemplate=fields(
            "workerTemplate",
            "leaderTemplate size restartPolicy subGroupPolicy",
            size={"type": "integer", "minimum": 1},
            restartPolicy={"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
        ),
    ),
)
"""From https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/; Kubernetes' own schemas check the pod templates."""

STUB = """import json, os, pathlib, sys
(pathlib.Path(os.environ["STUB_OUTPUT"]) / f"{os.environ['RANK']}.json").write_text(
    json.dumps([sys.argv[1:], dict(os.environ)])
)
"""
"""In place of `octavo`: writes down with what it was started."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_server(command=story_command(tmp_path_factory.mktemp("stories"), {})) as server:
        yield server


def manifest(kind: str, name: str = "octavo") -> dict:
    [found] = [one for one in MANIFESTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def pod() -> dict:
    return manifest("Deployment")["spec"]["template"]


def container() -> dict:
    return pod()["spec"]["containers"][0]


def group() -> dict:
    return manifest("LeaderWorkerSet", "octavo-group")["spec"]["leaderWorkerTemplate"]


@pytest.mark.parametrize(
    "document", [one for one in MANIFESTS if one["kind"] not in CUSTOM], ids=lambda one: one["kind"]
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


def test_a_group_follows_the_schemas_of_leader_worker_sets_and_of_pods() -> None:
    jsonschema.validate(manifest("LeaderWorkerSet", "octavo-group"), LEADER_WORKER_SET)
    for role in ("leaderTemplate", "workerTemplate"):
        document = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": role}, "template": group()[role]}
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_a_leader_and_its_workers_are_guarded_as_a_single_server_is() -> None:
    alone = pod()["spec"]
    for role in ("leaderTemplate", "workerTemplate"):
        assert group()[role]["metadata"]["labels"] == {"app": "octavo-group"}
        spec = group()[role]["spec"]
        [ranks] = spec["containers"]
        for name in ("enableServiceLinks", "automountServiceAccountToken", "securityContext"):
            assert spec[name] == alone[name]
        for name in ("image", "securityContext", "env"):
            assert ranks[name] == container()[name]
        assert {mount["name"] for mount in ranks["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    [leader] = group()["leaderTemplate"]["spec"]["containers"]
    for name in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[name] == container()[name]
        assert name not in group()["workerTemplate"]["spec"]["containers"][0]
    guard = manifest("NetworkPolicy", "octavo-group")["spec"]
    assert guard["podSelector"]["matchLabels"] == {"app": "octavo-group"}
    assert guard["ingress"][0] == {"ports": [{"protocol": "TCP", "port": leader["ports"][0]["name"]}]}
    assert manifest("Service", "octavo-group")["spec"]["selector"] == {
        "app": "octavo-group",
        "leaderworkerset.sigs.k8s.io/worker-index": "0",
    }


def expanded(argument: str, variables: dict[str, str]) -> str:
    """As Kubernetes does, but a variable that is missing is an error."""
    return re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], argument)


def test_torchrun_gives_the_ranks_of_a_group_their_places(tmp_path: Path) -> None:
    (tmp_path / "octavo").write_text(f"#!{sys.executable}\n{STUB}")
    (tmp_path / "octavo").chmod(0o755)
    port = str(free_port())
    nodes = []
    for index, role in enumerate(("leaderTemplate", "workerTemplate")):
        [ranks] = group()[role]["spec"]["containers"]
        assert ranks["command"] == ["tini", "--", "torchrun"]
        given = {"LWS_LEADER_ADDRESS": "127.0.0.1", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(index)}
        arguments = [expanded(argument, given) for argument in ranks["args"]]
        arguments[arguments.index("--master-port=29500")] = f"--master-port={port}"
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STUB_OUTPUT": str(tmp_path)}
        nodes.append(subprocess.Popen(command, env=environment))
    assert [node.wait(120) for node in nodes] == [0, 0]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(8)]
    for rank, (arguments, variables) in enumerate(found):
        assert arguments[0] == "serve"
        size = int(next(one for one in arguments if one.startswith("--tensor-parallel-size=")).partition("=")[2])
        assert find_launch(size, variables) == Launch(rank=rank, local_rank=rank % 4, local_size=4)
        assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("127.0.0.1", port)
