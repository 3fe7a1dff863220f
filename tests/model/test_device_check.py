"""The script that measures a GPU, run where there is none: no line of it shall run for the first time there."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "device_check.py"
SECTIONS = ["environment", "ceilings", "operators", "attention", "parity", "build", "decode", "prefill", "mixed"]
SECTIONS += ["engine", "http"]


def test_a_dry_run_goes_through_every_section_and_writes_its_results(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--output", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == SECTIONS
    assert not any("failed" in found for found in results.values())
    assert results["build"]["planned"] == results["build"]["ledger"] > 0
    assert results["engine"]["tokens"] == 12 * 8
    assert results["engine"]["a step of 4 rows, ms"] > 0
    for path in ("fa2", "xqa"):
        assert results["decode"][f"3 x 20, {path}, share of the measured read"] > 0
    assert not any("skipped" in found for found in results.values())
    answered = 3 * 4
    assert 0 < results["parity"]["GPU, captured: tokens as in float32"] <= answered
    assert results["parity"]["GPU, captured: error"] == results["parity"]["GPU, eager: error"]
    assert results["http"]["3 streams, tokens/s"] > 0
    assert (tmp_path / "results.md").read_text().startswith("| section | what | value |")
