"""The documents say what is."""

import re
import shlex
from pathlib import Path

from octavo.server.cli import make_parser
from octavo.server.metrics import Metrics
from octavo.server.openapi import BODIES
from octavo.server.settings import SETTINGS

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api.md"
OPERATIONS = ROOT / "docs" / "operations.md"
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def test_the_readme_lists_every_flag_and_no_other() -> None:
    table = (ROOT / "README.md").read_text().split("### Flags")[1].split("\n\n")[1]
    named = set(re.findall(r"--[a-z][a-z-]*|\| MODEL", table.replace("`--load-format random`", "")))
    expected = {setting.flag for setting in SETTINGS} - {"--page", "--prefix-caching", "MODEL"} | {
        "--no-page",
        "--no-prefix-caching",
        "| MODEL",
    }
    assert named == expected


def test_every_file_and_function_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(
            r"`((?:server|scheduler|model|kvcache|tests|docs|bench|deploy)/[\w/.-]+)", document.read_text()
        ):
            assert (ROOT / name.split(":")[0]).exists(), f"{document.name} names {name}"
        for path, function in re.findall(r"`(\w+/[\w/]+\.py):([\w.]+)`", document.read_text()):
            assert re.search(rf"(def|class) {function.split('.')[-1]}\b", (ROOT / path).read_text()), (
                f"{path}:{function}"
            )


def test_every_link_between_documents_leads_somewhere() -> None:
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_command_that_the_documents_show_can_be_parsed() -> None:
    parser = make_parser()
    found = 0
    for document in DOCUMENTS:
        for block in re.findall(r"^```\w*\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^(?:\$ )?(octavo .*)", block, re.MULTILINE):
                for command in line.split("&&"):
                    parser.parse_args(shlex.split(command, comments=True)[1:])
                    found += 1
    assert found >= 8


def test_the_api_document_lists_every_route_and_no_other() -> None:
    source = "".join(path.read_text() for path in (ROOT / "server").glob("*.py"))
    routes = {path.replace(":path", "") for path in re.findall(r'@app\.(?:get|post)\("([^"]+)"', source)}
    table = API.read_text().split("## Routes")[1].split("\n\n")[1]
    named = [cell for row in re.findall(r"^\| (?:GET|POST) (.*?) \|", table, re.MULTILINE) for cell in row.split(", ")]
    assert sorted(named) == sorted(routes | {"/", "/openapi.json"})


def test_the_api_document_names_every_field_of_every_request() -> None:
    named = set(re.findall(r"`(\w+)[`.]", API.read_text()))
    fields = {name for models in BODIES.values() for model in models for name in model.model_fields}
    assert fields - {"model"} <= named


def test_operations_name_metrics_that_exist_and_every_alert() -> None:
    text = OPERATIONS.read_text()
    exported = Metrics().exposition().decode()
    for name in set(re.findall(r"octavo_[a-z_]+", text)):
        assert re.search(rf"^# TYPE {name} ", exported, re.MULTILINE), name
    alerts = set(re.findall(r"alert: (\w+)", (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()))
    assert set(re.findall(r"^\| (Octavo\w+) \|", text, re.MULTILINE)) == alerts
