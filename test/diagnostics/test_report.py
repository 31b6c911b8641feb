"""Report page, its verdict, curves, facts and Markdown."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from torchrl_rloo.diagnostics.curves import Series, choose_panels, panel_names, render_charts
from torchrl_rloo.diagnostics.report import (
    difference_interval,
    duration,
    evaluation_changes,
    package_versions,
    read_events,
    verdict,
    write_report,
)
from torchrl_rloo.functional.statistics import Interval

PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)
FIRED = {"step": 9, "rule": "entropy", "severity": "warn", "state": "fired", "sentence": "It fell."}


def _history(steps: int = 30) -> list[dict[str, float]]:
    return [
        {"step": step, "reward": math.sin(step), "entropy": math.nan if step == 3 else 1 / step}
        | ({"eval/accuracy": step / steps} if step % 10 == 0 else {})
        for step in range(1, steps + 1)
    ]


class _Page(HTMLParser):
    """Parser that collects tags, links and text."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))
        self.text = "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# Curves


def test_panels_are_those_that_the_history_has():
    series = Series([*_history(), {"step": 1, "reward": None, "note": "text"}])
    charts, flat = render_charts(series, None)
    assert charts.count("<svg") == 3 and flat == {} and 'class="noisy"' in charts  # the reward is smoothed
    assert charts.count("<circle") == 3 and "step 30: 1<" in charts  # the evaluation is rarely measured
    assert render_charts(series, [["reward", "eval/*"]])[0].count("<svg") == 1
    mine = Series([{"step": step, "mine": 1.0 * step, "other": 1.0} for step in (1, 2)])
    assert render_charts(mine, None)[0].count("<svg") == 1 and render_charts(mine, None)[1] == {"other": 1.0}
    for history in ([], [{"step": 1}], [{"step": 1, "reward": math.nan}]):
        with pytest.raises(ValueError, match="history has no metric"):
            render_charts(Series(history), None)
    with pytest.raises(ValueError, match=r"panels requires \['loss'\].*'reward'"):
        render_charts(series, [["reward"], ["loss"]])


@pytest.mark.parametrize("values", [[0.5], [1e308, -1e308], [1e-300, 2e-300], [3.0] * 3, list(range(2000))])
def test_a_curve_stays_inside_its_axes(values):
    history = [{"step": step, "m": value, "m_low": value, "m_high": value} for step, value in enumerate(values)]
    chart, _ = render_charts(Series(history), [["m"]])
    places = re.findall(r"(-?[\d.]+),(-?[\d.]+)", "".join(re.findall(r'd="(M[^"]*)"', chart)))
    assert places and len(places) < 2000 and "nan" not in chart
    for x, y in places:
        assert 0 <= float(x) <= 420 and 0 <= float(y) <= 200


def test_constant_metrics_have_no_panel_but_evaluation_and_reward_do():
    names = ["reward", "eval/greedy", "entropy", "clip_ratio/low_mean", "grad_norm"]
    panels = choose_panels(names, None, constant=set(names) - {"grad_norm"})
    assert [p.title.split()[0] for p in panels] == ["Mean", "Held-out", "Gradient"]


def test_lengths_of_held_out_completions_are_no_scores():
    names = ["eval/greedy_length", "eval/sampled", "eval/greedy", "completions/mean_length", "eval/own"]
    panels = {panel.title: panel_names(names, panel) for panel in choose_panels(names, None)}
    assert panels == {
        "Held-out evaluation": ["eval/greedy", "eval/sampled", "eval/own"],
        "Mean completion length": ["completions/mean_length", "eval/greedy_length"],
    }
    rows = [{"step": s, "eval/greedy_length": 9.0, "eval/failed": 0.0, "eval/x": s} for s in (0, 1)]
    assert [change.name for change in evaluation_changes(Series(rows))] == ["eval/x"]


# Page


def test_the_page_needs_no_other_file(tmp_path):
    summary = {"eval/accuracy": 0.98765, "steps": 30, "broken": math.inf, "model": {"layers": 2}, "path": Path("x")}
    (tmp_path / "a.png").write_bytes(PIXEL)
    options = {"definitions": {"reward": "Mean <return>."}, "figures": {"A picture": tmp_path / "a.png"}}
    page = write_report(tmp_path / "out", history=_history(), summary=summary, **options)
    parsed = _Page(page)
    (link,) = parsed.links
    assert link.startswith("data:image/png;base64,") and "script" not in parsed.tags
    assert "http" not in page.read_text().replace("http-equiv", "")
    assert {"0.9877", "30", "layers", "Mean <return>."} <= set(parsed.texts)
    assert json.loads((page.parent / "summary.json").read_text()) == {
        "eval/accuracy": 0.98765, "steps": 30, "broken": None, "model": {"layers": 2}, "path": "x",
    }  # fmt: skip


def test_completions_are_shown_early_and_late_and_never_as_markup(tmp_path):
    attack = "</span></td><script>alert(1)</script><img src=http://x.example/>&amp;%SECTIONS%\ud800"
    rows = [
        {"step": step, "completion": f"{attack} s{step}r{row}", "messages": [{"role": "<i>", "content": attack}]}
        for step in (10, 20, 30)
        for row in range(6)
    ]
    tables = {"<b>": rows, "empty": [], "final": [{"completion": "only"}]}
    history = [row | {attack: float(row["step"])} for row in _history()]
    options = {"tables": tables, "settings": {attack: attack}, "panels": [[attack]], "title": attack}
    page = write_report(tmp_path, history=history, summary={"<u>": attack}, **options)
    parsed = _Page(page)
    assert "script" not in parsed.tags and "img" not in parsed.tags and parsed.links == []
    assert "</span></td><script>alert(1)</script><img src=http://x.example/>&amp;%SECTIONS%\\ud800 s10r0" in parsed.text
    assert parsed.tags.count("html") == 1 and parsed.text.count("Samples: ") == 2 and "only" in parsed.text
    text = parsed.text
    assert text.index("At step 10") < text.index("s10r3") < text.index("At step 30") < text.index("s30r3")
    assert "At step 20" not in text and "r4" not in text
    assert "default-src 'none'; script-src 'none'" in page.read_text()


def test_the_report_names_the_run_and_judges_it(tmp_path):
    (tmp_path / "transcripts").mkdir()
    (tmp_path / "transcripts" / "step_000030.html").touch()
    (tmp_path / "health.jsonl").write_text(json.dumps(FIRED) + "\n" + '{"half')
    settings = {"task": {"name": "addition"}, "algorithm": "rloo", "model": {"name": "tiny"}, "plan": {"steps": 30}}
    write_report(
        tmp_path,
        history=[row | {"flat": 1.0} for row in _history()],
        timings=[{"step": step, "time/step": 2.0, "cpu_seconds": 3.0 * step} for step in range(1, 31)],
        summary={},
        settings=settings,
        command="torchrl-rloo run rloo inference.engine.api_key=sesame",
    )
    page = _Page(tmp_path / "report.html")
    text = page.text
    assert "rloo on addition (tiny)" in text and "30 of 30" in text and "1 min 0 s of steps, 1 min 30 s of CPU" in text
    assert "Look at entropy: It fell." in text and "transcripts/step_000030.html" in page.links
    assert "sesame" not in text and "sesame" not in (tmp_path / "summary.json").read_text()
    assert (
        "flat" in text[text.index("Metrics that never changed") :] and "flat" not in text[: text.index("Metrics that")]
    )
    assert duration(3600) == "1 h 0 min" and "torch" in package_versions()


def test_the_sentence_about_waits_is_told_once(tmp_path):
    history = [{"step": step, "reward": 0.5} for step in range(1, 31)]
    timings = [{"step": step, "time/step": 2.0, "time/train": 1.8, "engine/busy": 0.5} for step in range(1, 31)]
    texts = []
    for events in ("", json.dumps(FIRED) + "\n"):  # a rule that fires takes the verdict's second sentence
        (tmp_path / "health.jsonl").write_text(events)
        texts.append(_Page(write_report(tmp_path, history=history, timings=timings, summary={})).text)
    assert [text.count("Training limits: ") for text in texts] == [1, 1]
    assert [text.index("Training limits: ") < text.index("Who waits for whom") for text in texts] == [True, False]
    assert "Who waits" not in _Page(write_report(tmp_path, history=history, summary={})).text


def test_the_page_of_an_unfinished_run_reloads_itself_and_comes_alone(tmp_path):
    page = write_report(tmp_path, history=_history(3), summary={}, finished=False)
    assert '<meta http-equiv="refresh"' in page.read_text() and [*tmp_path.iterdir()] == [page]
    assert 'http-equiv="refresh"' not in write_report(tmp_path, history=_history(3), summary={}).read_text()


# Verdict


def evaluated(step: int, mean: float, half: float = 0.05) -> dict:
    name = "eval/greedy"
    return {"step": step, name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


@pytest.mark.parametrize(
    ("last", "word"), [(0.6, "Learned: "), (0.32, "No change shown: "), (0.1, "Got worse: "), (0.3, "No change")]
)
def test_learned_is_what_the_interval_says(last: float, word: str):
    learned, _ = verdict(Series([evaluated(0, 0.3), evaluated(10, 0.9), evaluated(20, last)]))
    assert learned.startswith(word) and "95 % interval" in learned and f"{last:.3g} at step 20" in learned


def test_the_interval_of_a_difference_is_wider_than_either():
    mean, low, high = difference_interval(Interval(0.2, 0.1, 0.35), Interval(0.6, 0.55, 0.65))
    assert mean == pytest.approx(0.4)
    assert (low, high) == (pytest.approx(0.4 - math.hypot(0.05, 0.15)), pytest.approx(0.4 + math.hypot(0.05, 0.1)))


def test_without_an_interval_or_an_evaluation_it_does_not_claim():
    unsure = verdict(Series([{"step": 0, "eval/x": 0.1}, {"step": 1, "eval/x": 0.9}]))[0]
    assert unsure.startswith("Unsure: eval/x went from 0.1 at step 0 to 0.9 at step 1")
    rising = verdict(Series([{"step": i, "reward": i // 5} for i in range(20)]))[0]
    assert rising == "Not evaluated on held-out prompts: the mean training reward went from 0 to 3."
    assert verdict(Series([{"step": 1, "reward": 0.5}]))[0].startswith("Too early to tell: 1 steps")
    assert verdict(Series([]))[0].startswith("Too early") and evaluation_changes(Series([])) == []


def test_the_second_sentence_names_the_most_urgent_rule_or_the_limit():
    fired = FIRED | {"sentence": "It fell", "remedy": "Add KL."}
    stop = fired | {"rule": "nan", "severity": "stop", "sentence": "The loss is NaN."}
    solved = fired | {"rule": "solved", "severity": "info"}
    over = read_events([fired, fired | {"step": 15, "state": "cleared"}])

    def second(records: list[dict], limit: str = "") -> str:
        return verdict(Series([]), read_events(records), limit)[1]

    assert second([fired, stop]) == "Look at nan (1 more below): The loss is NaN. Add KL."
    assert second([solved]) == "Look at solved: It fell. Add KL."
    assert second([solved], "Sampling limits the run.") == second([], "Sampling limits the run.")
    assert verdict(Series([]), over)[1].startswith("Nothing stands out at the end; 1 warnings")
    assert second([]) == "No health rule holds."


def test_events_pair_and_survive_other_forms():
    line = {"step": 2, "rule": "a", "severity": "warn", "state": "fired", "evidence": {"x": 1, "y": None}}
    other = [{}, {"step": "2", "rule": "a"}, {"step": 1, "rule": 3}, {"step": 1, "rule": "b", "evidence": [1]}]
    events = read_events([*other, line, line | {"step": 4}, line | {"rule": "c", "severity": "?", "step": 9}])
    assert [(e.rule, e.step, e.severity, e.cleared) for e in events] == [("a", 2, "warn", None), ("c", 9, "info", None)]
