import io
import logging
import sys

from octavo.model.weights.progress import loading_progress

TOTAL = 1_000_000


def test_without_a_terminal_every_tenth_is_one_log_line(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO, "octavo.model.weights.progress")
    progress = loading_progress("weights")
    for done in [*range(1000, TOTAL, 1000), TOTAL]:
        progress(done, TOTAL)
    assert caplog.messages == [f"weights: {tenth}0 % of 1,000,000 bytes" for tenth in range(1, 11)]
    assert sys.stderr.getvalue() == ""


def test_a_step_over_several_tenths_is_one_line(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    caplog.set_level(logging.INFO, "octavo.model.weights.progress")
    progress = loading_progress("weights")
    progress(TOTAL // 2, TOTAL)
    progress(TOTAL, TOTAL)
    assert caplog.messages == ["weights: 50 % of 1,000,000 bytes", "weights: 100 % of 1,000,000 bytes"]


def test_on_a_terminal_a_bar_without_colours_runs_to_the_end(monkeypatch, caplog):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = loading_progress("weights")
    progress(TOTAL // 2, TOTAL)
    progress(TOTAL, TOTAL)
    drawn = terminal.getvalue()
    assert drawn.rstrip().rpartition("\r")[2].startswith("weights: 100%")
    assert "\x1b[3" not in drawn
    assert caplog.messages == []
