"""Live page in a real browser: it follows runs that are written, zooms into all charts, and links transcripts."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from matplotlib.image import imread

from torchrl_rloo.diagnostics.report import write_report
from torchrl_rloo.diagnostics.timeline import plot_timeline
from torchrl_rloo.diagnostics.watch import LiveServer
from torchrl_rloo.diagnostics.watch_page import write_live_page

READY = "document.querySelector('.chart canvas') && document.querySelectorAll('.run h3').length"
PLOTS = "[...charts].filter((chart) => chart.plot)"


def write_run(folder: Path, steps: range, offset: float = 0.0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"step": step, "reward": math.sin(step / 7) + offset, "entropy": 1 / step, "own/metric": step}
            if step % 10 == 0:
                row |= {"eval/greedy": 0.5, "eval/greedy_low": 0.4, "eval/greedy_high": 0.6}
            file.write(json.dumps(row | {"flat": 3.0}) + "\n")
    link = "transcripts/step_000010.html#row=3"
    sample = {"step": 10, "table": "held-out", "prompt": "?", "completion": "an answer", "transcript": link}
    (folder / "completions.jsonl").write_text(json.dumps(sample) + "\n")
    (folder / "settings.json").write_text(json.dumps({"plan": {"steps": 100}, "algorithm": "rloo", "offset": offset}))


@pytest.fixture
def server(tmp_path: Path):
    write_run(tmp_path / "one", range(1, 31))
    write_run(tmp_path / "two", range(1, 31), offset=1.0)
    (tmp_path / "one" / "transcripts").mkdir()
    (tmp_path / "one" / "transcripts" / "step_000010.html").write_text("<p>the conversation</p>")
    with LiveServer([tmp_path]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("dark", [False, True])
def test_follows_runs_as_they_are_written(browser, server, tmp_path, dark):
    browser.open(server.url, dark=dark, ready=f"{READY} === 2")
    titles = browser.js("[...document.querySelectorAll('#charts figcaption strong')].map((e) => e.textContent)")
    assert titles == ["Mean reward of the batch", "Held-out evaluation", "Policy entropy"]
    assert browser.js("isDark()") is dark
    assert browser.js(f"{PLOTS}[0].plot.series.filter((s) => !s.class && s.label !== 'step').map((s) => s.label)") == [
        "one", "two",
    ]  # fmt: skip
    assert "30 of 100" in browser.js("document.querySelector('.run').textContent")
    write_run(tmp_path / "one", range(31, 61))
    with (tmp_path / "one" / "health.jsonl").open("w") as file:
        event = {"step": 60, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It collapsed."}
        file.write(json.dumps(event) + "\n")
    browser.wait("document.querySelector('.run').textContent.includes('60 of 100')")
    browser.wait("document.querySelector('#health').textContent.includes('It collapsed.')")
    assert browser.js("runs[0].curves.series.get('reward').x") == list(range(1, 61))
    assert browser.js("runs[1].curves.series.get('reward').x.length") == 30
    assert "offset" in browser.js("document.querySelector('#settings .grid').textContent")  # the setting that differs
    assert "flat" in browser.js("document.querySelector('details.constant').textContent")
    address = browser.js("document.querySelector('.sample a').href")
    assert address == f"{server.url}runs/0/transcripts/step_000010.html#row=3"
    assert browser.complaints() == []


def test_zoom_hover_and_choice_of_runs(browser, server):
    browser.open(server.url, ready=f"{READY} === 2")
    rectangle = "document.querySelector('.u-over').getBoundingClientRect()"
    box = browser.js(f"(({{x, y, width, height}}) => [x, y, width, height])({rectangle})")
    at = lambda share: {"x": box[0] + share * box[2], "y": box[1] + box[3] / 2}  # noqa: E731
    browser("Input.dispatchMouseEvent", type="mouseMoved", **at(0.5))
    browser.wait("['15', '16'].includes(document.querySelector('.u-legend .u-value').textContent)")
    button = {"button": "left", "clickCount": 1}
    browser("Input.dispatchMouseEvent", type="mousePressed", **at(0.4), **button)
    browser("Input.dispatchMouseEvent", type="mouseMoved", **at(0.6), button="left")
    browser("Input.dispatchMouseEvent", type="mouseReleased", **at(0.6), **button)
    browser.wait("!document.getElementById('reset-zoom').hidden")
    browser.wait(f"{PLOTS}.every((c) => c.plot.scales.x.min > 10 && c.plot.scales.x.max < 21)")
    browser.click("#reset-zoom")
    browser.wait(f"{PLOTS}.every((c) => c.plot.scales.x.min < 1 && c.plot.scales.x.max > 30)")
    browser.click(".run input")
    browser.wait(f"{PLOTS}[0].plot.series.filter((s) => !s.class).length === 2")
    browser.click("details.group summary")
    browser.wait("document.querySelectorAll('#groups canvas').length === 1")
    assert browser.complaints() == []


@pytest.mark.parametrize("content", ["", '{"step": 1, "rew', "null\n[]\n", '{"step": 0, "eval/greedy": 0.5}\n'])
def test_a_page_of_little_or_broken_metrics(browser, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(content)
    page = write_live_page(tmp_path / "page.html", [tmp_path / "run"])
    browser.open(page, ready="document.querySelector('.run h3')")
    shown = 1 if "eval" in content else 0
    assert browser.js("document.querySelectorAll('.chart canvas').length") == shown
    assert browser.complaints() == []


def test_a_page_of_an_evaluation(browser, tmp_path):
    metrics = {"eval/greedy": 0.5, "eval/greedy_low": 0.4, "eval/greedy_high": 0.6}
    (tmp_path / "evaluation.json").write_text(json.dumps({"settings": {"label": "mine"}, "metrics": metrics}))
    browser.open(write_live_page(tmp_path / "page.html", [tmp_path]), ready="document.querySelector('.run h3')")
    assert "0.5 (0.4 to 0.6)" in browser.js("document.querySelector('#evaluations').textContent")
    assert browser.complaints() == []


def test_pages_fit_a_phone_and_share_their_head(browser, tmp_path):
    """Tables scroll by themselves, runs share the table of waits, and a legend names the last step."""
    for name in ("one", "two"):
        write_run(tmp_path / name, range(1, 21))
        rows = [
            {"step": s, "time/step": 2.0, "time/train": 1.0, "engine/busy": 0.5, "engine/in_flight": 3.0}
            for s in (19, 20)
        ]
        (tmp_path / name / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").open()]
    report = write_report(
        tmp_path / "one", history=history, timings=rows, summary={"cpu_seconds": 3.0, "plan": "20 steps"}
    )
    live = write_live_page(tmp_path / "page.html", [tmp_path])
    for page in (live, report):
        browser.open(page, width=390, ready="document.querySelector('.chart canvas')")
        assert browser.js("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        cells = "[...document.querySelectorAll('table.grid td')].map((cell) => cell.clientWidth).filter(Boolean)"
        assert min(browser.js(cells)) >= 60
        assert browser.js("getComputedStyle(document.querySelector('header')).display") == "flex"
        assert browser.js("document.querySelector('.u-legend .u-value').textContent") == "20"
        assert browser.js("document.getElementById('scheme').length") == 3 and not browser.complaints()
    text = report.read_text()
    assert "cpu_seconds</th>" not in text and "20 steps" in text
    browser.open(live, ready="document.querySelector('#waits tr')")
    assert browser.js("[...document.querySelectorAll('#waits tr')[0].cells].map((cell) => cell.textContent)") == [
        "who", "does", "one", "two",
    ]  # fmt: skip
    firsts = browser.js("[...document.querySelectorAll('#waits td:first-child')].map((cell) => cell.textContent)")
    assert firsts.count("trainer") == 1 and firsts.count("") >= 1


def test_a_picture_of_the_report_follows_the_color_scheme(browser, tmp_path):
    write_run(tmp_path, range(1, 31))
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    file = plot_timeline((0.0, 2.0, [("train", 0.0, 2.0)]), [], tmp_path / "timeline.png")
    report = write_report(tmp_path, history=history, summary={}, figures={"A step": file})
    for system in (False, True):
        browser.open(report, dark=system, ready="document.querySelector('section > img').complete")
        for chosen, dark in (("light dark", system), ("light", False), ("dark", True)):
            browser.js(f"scheme.value = '{chosen}', scheme.dispatchEvent(new Event('change'))")
            browser.js("document.querySelector('section > img').scrollIntoView({block: 'center'})")
            browser.screenshot(tmp_path / "page.png")
            box = browser.js("(({x, y}) => [x, y])(document.querySelector('section > img').getBoundingClientRect())")
            corner = imread(tmp_path / "page.png")[int(box[1]) + 12, int(box[0]) + 12, :3]
            assert (corner.max() < 0.2) == dark and (corner.min() > 0.9) == (not dark)
