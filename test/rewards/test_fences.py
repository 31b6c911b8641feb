"""Fenced blocks with code and JSON."""

from __future__ import annotations

import pytest

from torchrl_rloo.rewards.fences import last_block

PYTHON = ("", "py", "python", "python3")


@pytest.mark.parametrize(
    ("text", "found"),
    {
        "x = 1": "x = 1",
        "```python\na\n```\nor\n```py\nb\n```\nand\n```json\n{}\n```\n": "b\n",
        "```\na\n```": "a\n",
        "```\n```": "",
        "```Python3 title=x\na = '`'\n\nb\n```": "a = '`'\n\nb\n",
        "  ``` python\r\na\r\n  ``` \r\n": "a\r\n",
        "```json\n{}\n```": "```json\n{}\n```",
        "```python\ncut off": "```python\ncut off",
        "```python\ncut off\n```python\na\n```": "a\n",
        "```\nan odd one\n```python\na\n```": "a\n",
        "```python\na\n```\n```\ncut off": "a\n",
        "Write `a` or ```a```.": "Write `a` or ```a```.",
        '```\n"```"\n```': '"```"\n',
        "": "",
    }.items(),
)
def test_the_last_closed_block_of_a_language(text, found):
    assert last_block(text, PYTHON) == found


@pytest.mark.parametrize("unit", ["```python\n", "```js\n", "```\n", "``` x\n", "```python\nx\n", " ", "```python` "])
def test_it_takes_no_time_on_what_a_degenerate_policy_writes(unit):
    text = unit * (1_000_000 // len(unit))  # in quadratic time this would take hours
    assert last_block(text, ("json",)) == text
