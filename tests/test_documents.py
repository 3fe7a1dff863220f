"""The documents say what is."""

import re
from pathlib import Path

from octavo.server.settings import SETTINGS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]


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
            r"`((?:server|scheduler|model|kvcache|tests|docs|bench|deploy)/[\w/.]+)", document.read_text()
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
