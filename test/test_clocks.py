"""Durations and deadlines follow the monotonic clock: a jump of the system's clock has no effect."""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator
from pathlib import Path

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import ToolTransform
from torchrl_rloo.modules import vLLMWrapper

ROOT = Path(__file__).resolve().parents[1]

# The only places that read the system's clock, or times of files, and why
ALLOWED = {
    "torchrl_rloo/runtime/clock.py": "the epoch of a process, read once: it makes times of several machines comparable",
    "torchrl_rloo/collectors/ledger.py": "a time for readers of the audit",
    "torchrl_rloo/engines/pool.py": "a time for readers of the pool's events",
    "torchrl_rloo/agents/chat_format.py": "a field of OpenAI's format",
    "torchrl_rloo/agents/responses_format.py": "a field of OpenAI's format",
    "torchrl_rloo/replay/rollouts.py": "numbers of files, which always grow; the age of files of killed writers",
    "torchrl_rloo/rewards/remote.py": "a date that a server sent; total_timeout limits the wait",
    "torchrl_rloo/run/lock.py": "a time for readers of the lock",
}
WALL = {
    "time": {"time", "time_ns", "ctime", "localtime", "gmtime", "strftime", "CLOCK_REALTIME"},
    "datetime": {"now", "utcnow", "today"},
}
FILE_TIMES = {f"st_{kind}time{unit}" for kind in "acm" for unit in ("", "_ns")} | {f"get{kind}time" for kind in "acm"}


def wall_clocks(tree: ast.AST) -> Iterator[int]:
    """Return the lines that read the system's clock, or the time of a file."""
    modules = {"datetime": "datetime", "date": "datetime"}  # name of a module or class: its key in WALL
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name in WALL}
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for a in node.names if a.name in WALL["time"])
        elif isinstance(node, ast.ImportFrom) and node.module == "datetime":
            modules |= {a.asname: "datetime" for a in node.names if a.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", getattr(node.value, "attr", None))
            if node.attr in FILE_TIMES or node.attr in WALL.get(modules.get(owner, ""), ()):
                yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "time.time(" in node.value:
            yield node.lineno  # a script for another process


def test_only_listed_places_read_the_clock_of_the_system() -> None:
    found = {}
    for folder in ("torchrl_rloo", "sota_implementations", "tutorials"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if lines := sorted(set(wall_clocks(ast.parse(path.read_text())))):
                found[path.relative_to(ROOT).as_posix()] = lines
    new = {path: lines for path, lines in found.items() if path not in ALLOWED}
    assert not new, f"use time.monotonic() for durations and deadlines, or add the file to ALLOWED with a reason: {new}"
    assert set(ALLOWED) <= set(found), "remove from ALLOWED what reads no clock"


def test_the_guard_knows_every_spelling() -> None:
    source = """
import time as t, datetime
from time import monotonic, time_ns
from datetime import datetime as d
t.time(), t.monotonic(), datetime.datetime.now(), d.utcnow(), path.stat().st_mtime
loop.time()
script = "import time; print(time.time())"
"""
    assert sorted(wall_clocks(ast.parse(source))) == [3, 5, 5, 5, 5, 7]


def test_a_jump_of_the_clock_ends_no_conversation(monkeypatch) -> None:
    """The clock jumps by hours, forth and back, in the middle of conversations with time limits."""
    offset, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])

    def look(x: str) -> str:
        """Look.

        Args:
            x: what.
        """
        offset[0] += 7200.0 if offset[0] <= 0 else -14400.0
        return "rain"

    tokenizer = build_tokenizer()
    call = '<tool_call>{"name": "look", "arguments": {"x": "1"}}</tool_call><|im_end|>'
    call, answer = (tokenizer(text)["input_ids"] for text in (call, "\\boxed{85}<|im_end|>"))

    def script(request, index: int) -> ScriptedTurn:
        return ScriptedTurn(call if list(request.prompt).count(answer[-1]) < 9 else answer)

    tools = ToolTransform([look], parser="hermes")
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=2)),
        tokenizer,
        prompts_per_batch=2,
        num_generations=4,
        transforms=[tools],
        max_turns=12,
        max_seconds=600.0,
    )
    policy = vLLMWrapper(ScriptedEngine(script), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 256})
    collector = LLMCollector(env, policy)
    rows = collector.collect().unbind(0)
    collector.shutdown()
    assert [stop_reason(row["next"]) for row in rows] == ["answered"] * 8 and offset[0]
    assert {int(row[keys.NUM_TURNS]) for row in rows} == {5}
    assert {name for name, count in tools.counts.items() if count} == {"tools/look/calls"}
