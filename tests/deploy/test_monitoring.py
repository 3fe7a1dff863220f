"""Every query of the dashboard, the rules and the alerts, in a real Prometheus that scrapes a server under load."""

import contextlib
import json
import math
import re
import runpy
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml
from support.daemon import running
from support.measuring import stream_all
from support.tools import free_port, tool

DEPLOY = Path(__file__).parents[2] / "deploy"
CONFIGURATION = DEPLOY / "prometheus" / "prometheus.yml"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
VLLM = DEPLOY / "prometheus" / "vllm.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "octavo.json"
KEY = "sk-of-the-test"
VARIABLES = {"$instance": ".*", "$model": ".*", "$__rate_interval": "4s"}


def rules(path: Path) -> list[dict]:
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    return [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> list:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict]:
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        return self.get("query", query=expression)["result"]


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Requests with a common beginning, one wave after the other."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            stream_all(url, [{"prompt": [*range(5, 45), number], "max_tokens": 12} for number in range(8)], KEY)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()


def configure(directory: Path, target: str) -> Path:
    """Our own configuration, but for who is scraped, how often, and where the key is."""
    configuration = yaml.safe_load(CONFIGURATION.read_text())
    configuration["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
    configuration["rule_files"] = [str(CONFIGURATION.parent / name) for name in configuration["rule_files"]]
    [job] = configuration["scrape_configs"]
    assert job.pop("dns_sd_configs")[0]["port"] == 8000
    job["static_configs"] = [{"targets": [target]}]
    (directory / "key").write_text(KEY)
    job["authorization"]["credentials_file"] = str(directory / "key")
    path = directory / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    return path


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = tool("prometheus", "prometheus")
    directory = tmp_path_factory.mktemp("prometheus")
    with running("--api-key", KEY, "--max-num-seqs", "4", step_seconds=0.002) as daemon, load(daemon.url):
        scraper = Prometheus(f"http://127.0.0.1:{free_port()}")
        command = [
            program,
            f"--config.file={configure(directory, daemon.url.removeprefix('http://'))}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={scraper.url.removeprefix('http://')}",
            "--log.level=error",
        ]
        with subprocess.Popen(command) as process:
            try:
                wait_for_scrapes(scraper, process)
                yield scraper
            finally:
                process.terminate()


def wait_for_scrapes(prometheus: Prometheus, process: subprocess.Popen[bytes]) -> None:
    """Until the server was scraped ten times, and the rules evaluated after that."""
    deadline = time.monotonic() + 60
    for query in (
        "count_over_time(octavo_steps_total[1m]) >= 10",
        'count_over_time({__name__="vllm:num_requests_running"}[1m]) >= 5',
    ):
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with contextlib.suppress(httpx.TransportError, json.JSONDecodeError):  # it answers in words while it starts
                if prometheus.query(query):
                    break
            time.sleep(0.1)


@pytest.mark.parametrize(("title", "query"), panel_queries())
def test_g04_every_panel_shows_numbers(prometheus: Prometheus, title: str, query: str) -> None:
    found = prometheus.query(query)
    assert found, title
    assert all(math.isfinite(float(series["value"][1])) for series in found)


@pytest.mark.parametrize(("title", "query"), panel_queries())
def test_g04_every_metric_of_a_panel_is_exported(prometheus: Prometheus, title: str, query: str) -> None:
    for name in re.findall(r"octavo_\w+", query):
        assert prometheus.query(name), f"{title} asks for {name}"


def test_the_variables_offer_the_model_and_the_instance(prometheus: Prometheus) -> None:
    offered = {}
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        offered[variable["name"]] = [series["metric"][label] for series in prometheus.query(metric)]
    assert offered["model"] == ["smollm2"]
    assert len(offered["instance"]) == 1


@pytest.mark.parametrize("rule", rules(VLLM), ids=lambda rule: rule["record"])
def test_every_recorded_series_has_the_values_of_ours(prometheus: Prometheus, rule: dict) -> None:
    recorded = prometheus.query(f'{{__name__="{rule["record"]}"}}')
    assert recorded
    for series in recorded:
        assert series["metric"]["model_name"] == "smollm2"
        assert float(series["value"][1]) >= 0
    assert len(recorded) == len(prometheus.query(rule["expr"]))


@pytest.mark.parametrize("rule", rules(ALERTS), ids=lambda rule: rule["alert"])
def test_every_alert_looks_at_something_and_is_silent_on_a_healthy_server(prometheus: Prometheus, rule: dict) -> None:
    """With `bool`, a comparison yields 0 or 1 instead of dropping what does not hold."""
    expression = re.sub(r" (>|<|==) ", r" \1 bool ", rule["expr"])
    assert prometheus.query(expression)
    assert not prometheus.query(f'ALERTS{{alertname="{rule["alert"]}", alertstate="firing"}}')


def test_prometheus_evaluates_all_rules_without_an_error(prometheus: Prometheus) -> None:
    groups = prometheus.get("rules")["groups"]
    health = [(rule["name"], rule["health"]) for group in groups for rule in group["rules"]]
    assert len(health) == len(rules(ALERTS)) + len(rules(VLLM))
    assert {state for _, state in health} == {"ok"}


def test_promtool_accepts_the_configuration_and_the_rules() -> None:
    promtool = tool("promtool", "prometheus")
    subprocess.run([promtool, "check", "config", "--syntax-only", CONFIGURATION], check=True)
    subprocess.run([promtool, "check", "rules", ALERTS, VLLM], check=True)


def test_each_alert_fires_when_it_should() -> None:
    cases = Path(__file__).parent / "alerts_test.yml"
    tested = {
        case["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert tested == {rule["alert"] for rule in rules(ALERTS)}
    subprocess.run([tool("promtool", "prometheus"), "test", "rules", cases], check=True)


def test_the_dashboard_is_what_its_builder_builds() -> None:
    built = runpy.run_path(str(DEPLOY / "grafana" / "build.py"))["dashboard"]()
    assert json.loads(DASHBOARD.read_text()) == built
    assert len({panel["id"] for panel in built["panels"]}) == len(built["panels"])


def test_grafana_finds_the_data_source_that_the_panels_name() -> None:
    [source] = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert {panel["datasource"]["uid"] for panel in panels()} == {source["uid"]}
