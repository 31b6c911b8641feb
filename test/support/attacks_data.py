"""Generated attacks by dataset rows, dataset files and tool outputs, from a corpus of seeds.

:func:`attack` counts attacks that were contained: refused with one line that names the place, or read exactly.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchrl_rloo.data import encode_preferences, load_preferences, load_prompts
from torchrl_rloo.data.templates import encode_prompts
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs.tools.parsers import PARSERS, ToolCall
from torchrl_rloo.envs.tools.session import ToolSession
from torchrl_rloo.envs.tools.tool import Tool, ToolRegistry
from torchrl_rloo.runtime import event_loop

TEXTS = [
    *(
        "",
        " ",
        "a",
        "\0",
        "\ud800",
        "\udfff\ud800",
        "\ufeff",
        "\u202e",
        "<|im_end|>",
        "<|im_start|>system\n",
        "\x1b[2J",
    ),
    *(
        "{{ 7 * 7 }}",
        "{% raw %}",
        "__class__",
        "a.b",
        "next",
        "reward",
        "tokens",
        "NaN",
        "null",
        "1.0",
        "true",
        "x" * 3000,
    ),
    *("</tool_call>", "[TOOL_CALLS]", '"', "'", "\\", "\n", "\r\n", ",", "\u2028", "\U0001f600", "e\u0301", "role"),
]
SCALARS: list[Any] = [None, True, False, 0, 1, -1, 2**63, 10**400, 10**4100, 0.5, float("nan"), float("inf"), b"\xff"]
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("chatml.intel", {"question": "2+2?", "chosen": "4", "rejected": "5", "system": "s"}),
    ("chat_template.argilla_chat", {
        "chosen": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
        "rejected": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "5"}],
    }),
    ("zephyr.nectar", {"prompt": "2+2?", "answers": [{"answer": "4", "rank": 1}, {"answer": "5", "rank": 2}]}),
    ("user_defined.default", {"prompt": "2+2?", "chosen": "4", "rejected": "5"}),
]  # fmt: skip
CALLS = {
    "hermes": '<tool_call>{"name": "give", "arguments": {"n": [1, "a"]}}</tool_call>',
    "qwen_xml": "<function=give><parameter=n>1</parameter></function>",
    "llama": '<|python_tag|>give.call(n="1")',
    "mistral": '[TOOL_CALLS]give[ARGS]{"n": 1}',
    "python": "```python\nprint(1)\n```",
}


def make_value(rng: random.Random, depth: int = 4) -> Any:
    """Make a value of nested lists and mappings."""
    kind = rng.randrange(8 if depth else 5)
    if kind < 3:
        return "".join(rng.choices(TEXTS, k=rng.randrange(1, 4)))
    if kind < 5:
        return rng.choice(SCALARS)
    entries = [make_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return entries if kind < 7 else {rng.choice(TEXTS): entry for entry in entries}


def mutate(rng: random.Random, value: Any) -> Any:
    """Change one place of a value, its root included."""
    if not isinstance(value, list | dict) or not value or rng.random() < 0.15:
        return make_value(rng)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    copy = dict(value) if isinstance(value, dict) else list(value)
    if rng.random() < 0.1:
        del copy[key]
    elif rng.random() < 0.1 and isinstance(copy, dict):
        copy[rng.choice(TEXTS)] = make_value(rng)
    else:
        copy[key] = mutate(rng, value[key])
    return copy


def check_line(error: Exception, *places: str) -> None:
    """Check that an error has one line, which names all places."""
    message = str(error)
    assert "\n" not in message and len(message) < 2000, f"not one line: {message[:300]!r}"
    assert all(place in message for place in places), f"no place: {message[:300]!r}"


def attack_preferences(rng: random.Random, folder: Path, tokenizer) -> None:
    """Load a good row and a changed one: the changed one is listed, or as usable as the good one."""
    type_, good = rng.choice(ROWS)
    dataset = load_preferences([good, mutate(rng, good)], type_, drop_bad_rows=True)
    assert dataset[0] == load_preferences([good], type_)[0]
    if dataset.dropped:
        check_line(ValueError(dataset.dropped[0]), "row 1: ")
    elif dataset.markup == "tokenizer" and len(dataset) == 2:
        try:
            encode_preferences(dataset, tokenizer)
        except ValueError as error:  # answers may differ in white space or in fields that a template leaves out
            check_line(error, "example 1")


def attack_prompts(rng: random.Random, folder: Path, tokenizer) -> None:
    """Load a changed row of prompts, and encode it: no text becomes a control token."""
    query = rng.choice(["2+2?", [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]])
    row = mutate(rng, {"prompt": query, "answer": {"a": [1]}})
    try:
        dataset = load_prompts([row], chat=True)
    except ValueError as error:
        check_line(error)
        return
    messages = dataset.rows[0]["query"]
    (ids,) = encode_prompts(tokenizer, [messages])
    ends = tokenizer.convert_tokens_to_ids("<|im_end|>")
    open_turn = messages[-1]["role"] == "assistant"
    assert ids.count(ends) == len(messages) - open_turn, f"control token in {messages!r:.300}"


def attack_file(rng: random.Random, folder: Path, tokenizer) -> None:
    """Change bytes of a file: it is refused with its name, or read."""
    rows = [{"prompt": f"{i}?", "answer": rng.choice([1, "a", "b,c"])} for i in range(3)]
    suffix = rng.choice([".jsonl", ".json", ".csv"])
    lines = {".jsonl": "\n".join(map(json.dumps, rows)), ".json": json.dumps(rows)}
    text = lines.get(suffix, "prompt,answer\n" + "".join(f'{r["prompt"]},"{r["answer"]}"\n' for r in rows))
    content = bytearray(text.encode())
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(content))
        piece = rng.choice(TEXTS).encode("utf-8", "surrogatepass")[:50]
        content[place : place + rng.randrange(3)] = rng.choice([piece, bytes([rng.randrange(256)]), b""])
    path = folder / f"rows{suffix}"
    path.write_bytes(bytes(content))
    try:
        load_prompts(path)
    except ValueError as error:
        check_line(error)
        assert str(path) in str(error) or "prompt_column" in str(error), f"no file: {error!s:.300}"


class _Give(Tool):
    def __init__(self, value: Any):
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
        super().__init__("give", "Gives.", parameters)
        self.value = value

    def call(self, state: None, /, n: int = 0) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def attack_tool(rng: random.Random, folder: Path, tokenizer) -> None:
    """Call a tool with generated arguments that returns, or raises, a generated value."""
    value = make_value(rng)
    tool = _Give(ValueError(value) if rng.random() < 0.3 else value)
    session = ToolSession(ToolRegistry([tool]), {}, timeout=60.0, max_chars=200)
    arguments = rng.choice([{}, {"n": 1}, {"n": make_value(rng)}, {rng.choice(TEXTS): make_value(rng)}])
    result = event_loop.run(session.call(ToolCall(rng.choice(["give", "give", rng.choice(TEXTS)]), arguments)))
    assert len(result.text) < 300 and "\0" not in result.text and result.text.encode() is not None
    assert (result.outcome == "ok") or result.text.startswith("Error: ")


def attack_parser(rng: random.Random, folder: Path, tokenizer) -> None:
    """Parse a damaged call, and make what was read."""
    name = rng.choice(list(CALLS))
    text = CALLS[name]
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(text) + 1)
        text = text[:place] + rng.choice(TEXTS) + text[place + rng.randrange(4) :]
    session = ToolSession(ToolRegistry([_Give("fine")]), {}, timeout=60.0, max_chars=200)
    for call in PARSERS[name](text)[:3]:
        result = event_loop.run(session.call(call))
        assert len(result.text) < 300 and result.text.encode() is not None


ATTACKS: list[Callable[[random.Random, Path, Any], None]] = [
    attack_preferences,
    attack_prompts,
    attack_file,
    attack_tool,
    attack_parser,
]


def attack(count: int, seed: int) -> dict[str, Any]:
    """Run generated attacks in turn.

    Args:
        count: number of attacks.
        seed: seed of all of them.

    Returns:
        Numbers of attacks tried and contained, and a text for each that was not.
    """
    failures, tokenizer = [], build_tokenizer()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            run = ATTACKS[i % len(ATTACKS)]
            try:
                run(random.Random(f"{seed} {i}"), Path(folder), tokenizer)
            except Exception as error:
                failures.append(f"{run.__name__}, seed {seed}, attack {i}: {type(error).__name__}: {error!s:.300}")
    return {"tried": count, "contained": count - len(failures), "failures": failures}
