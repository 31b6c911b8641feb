"""Training curves and the report page."""

from __future__ import annotations

import base64
import json
import math
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.image import imread

from torchrl_rloo.diagnostics import curves
from torchrl_rloo.diagnostics.curves import plot_curves
from torchrl_rloo.diagnostics.report import write_report


def _history(steps: int = 30) -> list[dict[str, float]]:
    return [
        {"step": step, "reward": math.sin(step), "entropy": math.nan if step == 3 else 1 / step}
        | ({"eval/accuracy": step / steps} if step % 10 == 0 else {})
        for step in range(1, steps + 1)
    ]


class _Page(HTMLParser):
    """Parser that collects tags, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_panels_are_those_that_the_history_has(tmp_path: Path) -> None:
    wide = imread(plot_curves(_history(), tmp_path / "new" / "three.png"))
    narrow = imread(plot_curves(_history(), tmp_path / "one.png", panels=[["reward", "eval/*"]]))
    assert wide.shape[1] == 3 * narrow.shape[1] and wide.shape[0] == narrow.shape[0]
    assert wide[..., :3].std() > 0.05  # not blank


def test_other_metrics_are_drawn_when_there_are_no_usual_ones(tmp_path: Path) -> None:
    history = [{"step": 1, "mine": 1.0, "other": None, "note": "text"}, {"step": 2, "mine": 2}]
    one = imread(plot_curves(history, tmp_path / "a.png"))
    two = imread(plot_curves([{**entry, "other": -entry["step"]} for entry in history], tmp_path / "b.png"))
    assert two.shape[1] == 2 * one.shape[1]


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    for history in ([], [{"step": 1}], [{"step": 1, "reward": math.nan}]):
        with pytest.raises(ValueError, match="history has no metric"):
            plot_curves(history, tmp_path / "curves.png")
    with pytest.raises(ValueError, match=r"panels requires \['loss'\].*'reward'"):
        plot_curves(_history(), tmp_path / "curves.png", panels=[["reward"], ["loss"]])


def test_plotting_needs_no_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    fresh = runpy.run_path(curves.__file__)
    assert fresh["plot_curves"](_history(), tmp_path / "a.png").is_file()


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    summary = {"eval/accuracy": 0.98765, "steps": 30, "broken": math.inf, "model": {"layers": 2}, "path": Path("x")}
    page = write_report(tmp_path / "out", history=_history(), summary=summary, definitions={"reward": "Mean <return>."})
    parsed = _Page(page.read_text(encoding="utf-8"))
    (link,) = parsed.links
    assert base64.b64decode(link.removeprefix("data:image/png;base64,")) == (page.parent / "curves.png").read_bytes()
    text = page.read_text().replace(link, "").replace("http-equiv", "").replace("https://github.com/leeoniya/uPlot", "")
    assert "http" not in text
    assert {"0.9877", "30", "layers", "Mean <return>."} <= set(parsed.text)
    assert json.loads((page.parent / "summary.json").read_text()) == {
        "eval/accuracy": 0.98765, "steps": 30, "broken": None, "model": {"layers": 2}, "path": "x",
    }  # fmt: skip


def test_completions_are_shown_early_and_late_and_never_as_markup(tmp_path: Path) -> None:
    attack = "</span></td><script>alert(1)</script><img src=http://x.example/>&amp;%SECTIONS%\ud800"
    rows = [
        {"step": step, "completion": f"{attack} s{step}r{row}", "messages": [{"role": "<i>", "content": attack}]}
        for step in (10, 20, 30)
        for row in range(6)
    ]
    page = write_report(tmp_path, history=_history(), summary={"<u>": attack}, tables={"<b>": rows, "empty": []})
    parsed = _Page(page.read_text(encoding="utf-8"))
    text = "".join(parsed.text)
    assert parsed.tags.count("script") == 2 and parsed.tags.count("img") == 1 and len(parsed.links) == 1
    assert "</span></td><script>alert(1)</script><img src=http://x.example/>&amp;%SECTIONS%\\ud800 s10r0" in text
    assert parsed.tags.count("html") == 1 and text.count("Samples: ") == 1
    assert text.index("At step 10") < text.index("s10r3") < text.index("At step 30") < text.index("s30r3")
    assert "At step 20" not in text and "r4" not in text


def test_rows_without_a_step_and_of_one_step(tmp_path: Path) -> None:
    tables = {"final": [{"completion": "only"}], "once": [{"step": 5, "completion": "single"}]}
    text = "".join(_Page(write_report(tmp_path, history=_history(), summary={}, tables=tables).read_text()).text)
    text = text[text.index("Samples: final") :]
    assert text.count("only") >= 1 and text.count("single") >= 1 and text.count("At step 5") == 1


def test_the_report_names_the_run_and_judges_it(tmp_path: Path) -> None:
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts" / "step_000030.html").touch()
    event = {"step": 9, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It fell."}
    (tmp_path / "health.jsonl").write_text(json.dumps(event) + "\n" + '{"half')
    settings = {"task": {"name": "addition"}, "algorithm": "rloo", "model": {"name": "tiny"}, "plan": {"steps": 30}}
    write_report(
        tmp_path,
        history=[row | {"flat": 1.0} for row in _history()],
        timings=[{"step": step, "time/step": 2.0, "cpu_seconds": 3.0 * step} for step in range(1, 31)],
        summary={},
        settings=settings,
        command="torchrl-rloo run rloo inference.engine.api_key=sesame",
    )
    page = _Page((tmp_path / "report.html").read_text())
    text = "".join(page.text)
    assert "rloo on addition (tiny)" in text and "30 of 30" in text and "1 min 0 s of steps, 1 min 30 s of CPU" in text
    assert "Look at entropy: It fell." in text and "transcripts/step_000030.html" in page.links
    assert "sesame" not in text and "sesame" not in (tmp_path / "summary.json").read_text()
    data = json.loads(text[text.index('{"panels"') : text.index("\n", text.index('{"panels"'))])
    assert data["constants"]["flat"] == [1.0] and "flat" not in str(data["panels"])
    markdown = (tmp_path / "report.md").read_text()
    assert markdown.startswith("## rloo on addition (tiny)") and "It fell." in markdown and "sesame" not in markdown


def test_the_sentence_about_waits_is_told_once(tmp_path: Path) -> None:
    history = [{"step": step, "reward": 0.5} for step in range(1, 31)]
    timings = [{"step": step, "time/step": 2.0, "time/train": 1.8, "engine/busy": 0.5} for step in range(1, 31)]
    fired = {"step": 9, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It fell."}
    texts = []
    for events in ("", json.dumps(fired) + "\n"):  # a rule that fires takes the verdict's second sentence
        (tmp_path / "health.jsonl").write_text(events)
        page = write_report(tmp_path, history=history, timings=timings, summary={}).read_text()
        texts.append("".join(_Page(page).text))
    assert [text.count("Training limits: ") for text in texts] == [1, 1]
    assert [text.index("Training limits: ") < text.index("Who waits for whom") for text in texts] == [True, False]


def test_the_page_of_an_unfinished_run_reloads_itself_and_comes_alone(tmp_path: Path) -> None:
    page = write_report(tmp_path, history=_history(3), summary={}, finished=False)
    assert '<meta http-equiv="refresh"' in page.read_text() and [path.name for path in tmp_path.iterdir()] == [
        page.name
    ]
    assert 'http-equiv="refresh"' not in write_report(tmp_path, history=_history(3), summary={}).read_text()
