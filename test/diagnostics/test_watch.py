"""Live page without a browser: incremental reading, bins, the data of the page, and its server."""

from __future__ import annotations

import base64
import http.client
import json
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from torchrl_rloo.cli.main import main
from torchrl_rloo.diagnostics.report_facts import LAUNCH_FILE, write_launch
from torchrl_rloo.diagnostics.watch import LiveServer
from torchrl_rloo.diagnostics.watch_files import LineFile, parse_objects, read_last_lines
from torchrl_rloo.diagnostics.watch_page import LivePage, write_live_page
from torchrl_rloo.diagnostics.watch_run import WatchedRun, find_runs
from torchrl_rloo.diagnostics.watch_series import BINS, Series, bin_width, downsample


def lines(steps, **values) -> str:
    return "".join(json.dumps({"step": s} | {k: v(s) for k, v in values.items()}) + "\n" for s in steps)


def unpacked(text: str, dtype=np.float32) -> list[float]:
    return np.frombuffer(base64.b64decode(text), dtype).tolist()


def test_a_growing_file_is_read_once(tmp_path: Path):
    file = LineFile(tmp_path / "metrics.jsonl")
    assert file.read() == b"" and file.restarts == 0
    file.path.write_bytes(b"one\ntwo\nthr")
    assert (file.read(), file.read(), file.pending) == (b"one\ntwo\n", b"", 0)
    with file.path.open("ab") as more:
        more.write(b"ee\nfour\n")
    assert file.read(limit=6) == b"three\n" and file.pending == 5
    assert file.read(limit=2) == b"four\n" and file.restarts == 0


@pytest.mark.parametrize("content", [b"a\n", b"one\nTWO\nthree\nfour\n", b""])
def test_a_replaced_file_is_read_again(tmp_path: Path, content: bytes):
    file = LineFile(tmp_path / "metrics.jsonl")
    file.path.write_bytes(b"one\ntwo\n")
    assert file.read() == b"one\ntwo\n"
    with file.path.open("r+b") as same:  # the same inode, as the system may reuse it
        same.truncate(0)
        same.write(content)
    assert file.read() == content and file.restarts == 1


def test_links_and_other_files_are_not_read(tmp_path: Path):
    (tmp_path / "secret").write_text('{"step": 1}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "timings.jsonl")
    assert LineFile(tmp_path / "metrics.jsonl").read() == LineFile(tmp_path / "timings.jsonl").read() == b""
    assert read_last_lines(tmp_path / "metrics.jsonl") == read_last_lines(tmp_path / "timings.jsonl") == []


def test_damaged_lines_are_counted():
    good = [b'{"step": 1}', b'{"step": 2, "a": null}']
    assert parse_objects([*good, b"", b"{", b"3", b"[" * 10_000, b"\xff"]) == ([{"step": 1}, {"step": 2, "a": None}], 4)
    series = Series()
    series.add_lines(b'{"step": 1, "a": 2, "b": true, "c": "x", "d": NaN}\n{"a": 1}\n{"step": 1e3}\n{"st')
    assert series.names == ["a"] and series.damaged == 3 and series.steps == (1, 1)


def test_the_newest_values_are_those_of_the_last_records():
    """Records with an evaluation have other names than those between them."""
    series = Series()
    series.add([{"step": s, "reward": s / 10} | ({"eval/greedy": s} if s % 3 == 0 else {}) for s in range(12)])
    assert series.steps == (0, 11) and series.last("reward", 2) == [1.0, 1.1] and series.last("eval/greedy") == [9]
    assert list(series.column("reward")[0]) == list(range(12))


def test_command_and_versions_are_shown_while_a_run_trains(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(lines([1], reward=float))
    write_launch(tmp_path, "torchrl-rloo run rloo inference.engine.api_key=sesame seed=3")
    assert "sesame" not in (tmp_path / LAUNCH_FILE).read_text()
    facts = WatchedRun(tmp_path, "run").sections()["facts"]
    assert facts["Command"] == "torchrl-rloo run rloo inference.engine.api_key=*** seed=3"
    assert facts["Versions"].startswith("Python 3") and "torch " in facts["Versions"]
    (tmp_path / LAUNCH_FILE).write_text('{"command": 3, "versions": [1]}')  # of another form
    assert WatchedRun(tmp_path, "run").sections()["facts"] == {"Command": "3"}


def test_both_parsers_agree():
    rng = np.random.default_rng(0)
    rows = [
        {"step": s, "whole": s % 7 if s < 900 else s / 3, "real": float(rng.normal()), "text": "x", "flag": True}
        | ({"rare": None if s % 2 else 1.5} if s % 50 == 0 else {})
        for s in range(4000)
    ]
    block = "".join(json.dumps(row) + "\n" for row in rows).encode()
    fast, slow = Series(), Series()
    fast.add_lines(block)
    slow.add(rows)
    assert len(block) > 1 << 18 and fast.names == slow.names == ["whole", "real", "rare"]
    for name in fast.names:
        assert all(map(np.array_equal, fast.column(name), slow.column(name)))
    broken = Series()
    broken.add_lines(block + b'{"step": "x"}\n{"real": "y", "step": 4000, "whole": 1}\n[]\n')
    assert broken.damaged == 2 and broken.steps == (0, 4000) and len(broken.column("real")[0]) == 4000


def test_bins_keep_every_extreme_and_bound_the_work():
    steps = np.arange(100_000)
    values = np.zeros(len(steps))
    values[[12_345, 77_777]] = [9.0, -9.0]
    width = bin_width(0, 99_999, BINS)
    x, mean, low, high = downsample(steps, values, width)
    assert len(x) <= BINS and high.max() == 9 and low.min() == -9 and abs(x[high.argmax()] - 12_345) < width
    assert (low <= mean).all() and (mean <= high).all() and (np.diff(x) > 0).all()
    assert np.isfinite(downsample(np.array([0, 1]), np.array([1.7e308, 1.7e308]), 4)[1]).all()


def test_increments_rebuild_the_whole(tmp_path: Path):
    """A page that merges increments has the same bins as one that loads everything, across changes of the width."""
    run, held, known = WatchedRun(tmp_path, "run"), {}, (None, None, None)
    for first in range(0, 2400, 150):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(lines(range(first, first + 150), a=lambda s: s**0.5) + '{"half')
        run.update()
        with (tmp_path / "metrics.jsonl").open("r+") as file:
            file.truncate(file.seek(0, 2) - 6)
        generation, width, since = known
        same = generation == run.series.generation
        found = run.series.bins(width=width if same else None, since=since if same else None)
        mean = dict(zip(unpacked(found["xs"][0], np.float64), unpacked(found["series"]["a"][1]), strict=True))
        kept = {} if found["start"] is None else {x: y for x, y in held.items() if x < found["start"]}
        held = kept | mean
        known = (run.series.generation, found["width"], run.series.complete_until())
        assert len(mean) <= 152 if found["start"] is not None else len(mean) <= BINS
    whole = run.series.bins()
    assert list(held.items()) == list(
        zip(unpacked(whole["xs"][0], np.float64), unpacked(whole["series"]["a"][1]), strict=True)
    )
    assert whole["width"] == 4 and run.series.damaged == 0


def test_a_resumed_run_is_read_again(tmp_path: Path):
    run = WatchedRun(tmp_path, "run")
    (tmp_path / "metrics.jsonl").write_text(lines(range(9), a=float))
    run.update()
    generation = run.series.generation
    (tmp_path / "new").write_text(lines(range(4), a=float))
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    run.update()
    assert run.series.steps == (0, 3) and run.series.generation > generation


def test_a_long_run_is_shown_whole_before_it_is_read(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(lines(range(20_000), a=float) + '{"step": 20000, "a": 1')
    page = LivePage([tmp_path])
    first = page.update(limit=1 << 14)
    steps = unpacked(first["runs"][0]["bins"]["xs"][0], np.float64)
    assert first["pending"] > 0 and first["runs"][0]["facts"]["step"] == 19_999
    width = 20_000 / BINS
    assert steps[0] < 2 * width and max(np.diff(steps)) < 3 * width  # evenly, to the last whole line
    known = {**first["runs"][0], "width": first["runs"][0]["bins"]["width"]}
    while (answer := page.update({"runs": [known]}, limit=1 << 20))["pending"]:
        assert answer["runs"][0]["facts"]["step"] == 19_999  # the same sample until all is read
    state = answer["runs"][0]
    assert state["generation"] != first["runs"][0]["generation"] and state["bins"]["start"] is None
    exact = page.runs[0].series.column("a")[0]
    assert exact.tolist() == list(range(20_000)) and page.runs[0].shown is page.runs[0].series


def test_nothing_new_costs_nothing(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(lines(range(100_000), a=float))
    page = LivePage([tmp_path])
    first = page.update(limit=1 << 20)
    assert first["pending"] > 0  # the first answer does not wait for all
    while page.update(limit=1 << 20)["pending"]:
        pass
    state = page.update()["runs"][0]
    assert len(unpacked(state["bins"]["xs"][0], np.float64)) <= BINS
    known = {"width": state["bins"]["width"], "generation": state["generation"], "next": state["next"]}
    again = page.update({"sections": page.update()["stamp"], "runs": [known]})
    assert "sections" not in again and len(unpacked(again["runs"][0]["bins"]["xs"][0], np.float64)) == 1


def test_what_a_page_claims_to_have_may_be_anything(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(lines(range(5), a=float))
    page = LivePage([tmp_path])
    wrong = [{"generation": 0, "width": 0, "next": -1}, {"generation": 0, "width": 1, "next": 10**30}, None]
    for known in ({"runs": 3}, {"sections": []}, *({"runs": [run]} for run in wrong)):
        assert len(unpacked(page.update(known)["runs"][0]["bins"]["xs"][0], np.float64)) == 5
    assert page.update({"runs": [{"generation": 0, "width": 1, "next": 10**9}]})["runs"][0]["bins"]["series"] == {}


def test_runs_are_found_below_and_evaluations_too(tmp_path: Path):
    for name in ("a/seed0", "b/seed0"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    (tmp_path / "e").mkdir()
    metrics = {"eval/greedy": 0.5, "eval/greedy_low": 0.4, "eval/greedy_high": None}
    (tmp_path / "e" / "evaluation.json").write_text(json.dumps({"settings": {"label": "mine"}, "metrics": metrics}))
    page = LivePage([tmp_path])
    assert [run.name for run in page.runs] == ["a/seed0", "b/seed0", f"{tmp_path.name}/e"]
    sections = page.update()["sections"]["runs"]
    assert sections[2]["evaluations"] == [{"name": "eval/greedy", "last": [0.5, 0.4, None]}]
    assert sections[2]["facts"] == {"Evaluation": "mine"} and sections[0]["verdict"] == []
    (tmp_path / "empty").mkdir()
    assert find_runs([tmp_path / "empty"]) == [tmp_path / "empty"]
    with pytest.raises(FileNotFoundError, match="is no folder"):
        find_runs([tmp_path / "missing"])


@contextmanager
def served(folder: Path):
    with LiveServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LiveServer, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.putrequest("GET", path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return found


def test_the_server_answers_only_who_knows_the_address(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(lines(range(5), reward=float))
    with served(tmp_path) as server:
        root = f"/{server.secret}"
        assert server.server_address[0] == "127.0.0.1"
        status, page, headers = ask(server, f"{root}/")
        assert status == 200 and b"<!DOCTYPE html>" in page
        assert headers["X-Frame-Options"] == "DENY" and headers["Cache-Control"] == "no-store"
        status, data, _ = ask(server, f"{root}/data")
        assert status == 200 and json.loads(data)["runs"][0]["facts"]["step"] == 4
        for path in ("/", "/data", f"/{server.secret[:-1]}/data", f"{root}", "//x/data", "/%ff/data", "//["):
            assert ask(server, path)[0] in (400, 404), path
        for host in ("evil.example", f"evil.example:{server.server_address[1]}", "", "127.0.0.1.evil.example:80"):
            assert ask(server, f"{root}/data", Host=host)[0] == 403
        assert ask(server, f"{root}/data", Host="localhost:8080")[0] == 200  # a tunnel
        assert ask(server, f"{root}/data", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
        for query in ("known=[]", "known={", "x", 'known={"low":1}', 'known={"low":2,"high":1}', f"known={'[' * 9000}"):
            assert ask(server, f"{root}/data?{query}".replace('"', "%22"))[0] == 400
        detail = json.loads(ask(server, f"{root}/data?known=%7B%22low%22:2,%22high%22:3%7D")[1])
        assert unpacked(detail["runs"][0]["bins"]["xs"][0], np.float64) == [2, 3]


def test_the_server_reads_no_other_file(tmp_path: Path):
    run = tmp_path / "run"
    (run / "transcripts").mkdir(parents=True)
    (run / "metrics.jsonl").write_text(lines(range(5), reward=float))
    for path in (tmp_path / "secret.html", run / "secret.html", run / "transcripts" / "step_1.html"):
        path.write_text(path.name)
    (run / "transcripts" / "link.html").symlink_to(tmp_path / "secret.html")
    with served(run) as server:
        root = f"/{server.secret}/runs"
        status, text, headers = ask(server, f"{root}/0/transcripts/step_1.html")
        assert (status, text) == (200, b"step_1.html") and "sandbox" in headers["Content-Security-Policy"]
        for path in (
            "0/secret.html", "0/../secret.html", "0/..%2fsecret.html", "0/transcripts/..%2f..%2fsecret.html",
            "0/transcripts/../secret.html", "0/transcripts/link.html", "1/transcripts/step_1.html", "-1/report.html",
            "0/transcripts/", "0/metrics.jsonl", "0/transcripts/%00.html", "0/report.html", "%d9%a0/report.html",
            "9" * 5000 + "/report.html",
        ):  # fmt: skip
            assert ask(server, f"{root}/{path}")[0] in (400, 404), path
        (run / "transcripts").rename(tmp_path / "moved")
        (run / "transcripts").symlink_to(tmp_path / "moved")
        assert ask(server, f"{root}/0/transcripts/step_1.html")[0] == 404


def test_a_file_needs_no_server_and_links_transcripts(tmp_path: Path):
    run = tmp_path / "java script:x"
    (run / "transcripts").mkdir(parents=True)
    (run / "transcripts" / "step_000002.html").touch()
    (run / "metrics.jsonl").write_text(lines(range(5), reward=float))
    text = write_live_page(tmp_path / "pages" / "page.html", [run]).read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["bases"] == ["./../java%20script%3Ax/"]
    assert data["data"]["sections"]["runs"][0]["links"] == [["step 2", "transcripts/step_000002.html"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing is no folder"),
        ([".", "--port", "70000"], "--port 70000 must be from 0 to 65535"),
        ([".", "--port", "8000", "--output", "a.html"], "--port has no effect with --output"),
        ([".", "--output", "a.png"], "must end in .html"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["watch", *arguments])
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
