from __future__ import annotations

import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrl.envs.llm.reward.gsm8k import GSM8KRewardParser

from torchrl_rloo.rewards import RewardBatch, call_reward, load_reward
from torchrl_rloo.rewards.formats import RegexFormat, find_program, last_block, think_format

PIECES = st.lists(st.sampled_from(["<think>", "</think>", "a", "\n", " ", "<THINK>", "think>"]), max_size=6).map(
    "".join
)


@given(PIECES)
def test_think_format_is_one_opening_at_the_start_and_a_closing(text):
    tags = re.findall("</?think>", text)
    expected = text[:7] == "<think>" and tags.count("<think>") == 1 and "</think>" in tags
    assert think_format(["?"], [text], [[1]]) == [expected]


def test_the_last_assistant_message_is_judged():
    good, bad = ({"role": "assistant", "content": text} for text in ("<think></think>7", "7"))
    assert think_format(["?"] * 3, [[bad, good], [good, bad], []], [[1]] * 3) == [1, 0, 0]


def matches(texts, *args, **settings):
    return RegexFormat(*args, **settings)(["?"] * len(texts), texts, [[1]] * len(texts))


def test_regex_format():
    texts = ["<a>1</a>", "<a>1\n2</a>", "x<a>1</a>", "<A>1</A>", [{"role": "assistant", "content": "<a></a>"}], []]
    assert matches(texts, "<a>.*</a>") == [1, 1, 0, 0, 1, 0]
    assert matches(texts, "<a>.*</a>", search=True) == [1, 1, 1, 0, 1, 0]
    assert matches(texts, "<a>.*</a>", flags="") == [1, 0, 0, 0, 1, 0]
    assert matches(texts, "<a>.*</a>", flags="si") == [1, 1, 0, 1, 1, 0]
    assert matches(texts, "(?i)<a>.*</a>") == [1, 1, 0, 1, 1, 0]


@given(PIECES)
def test_regex_format_matches_a_text_as_itself_alone(text):
    reward = pickle.loads(pickle.dumps(RegexFormat(re.escape(text))))
    assert reward(["?"] * 2, [text, text + "!"], [[1]] * 2) == [1, 0]


@pytest.mark.parametrize("pattern", ["(", "*", "[a", None, 3])
def test_patterns_that_are_none(pattern):
    with pytest.raises(ValueError, match="must be a valid regular expression"):
        RegexFormat(pattern)


def test_flags_that_are_none():
    with pytest.raises(ValueError, match="unknown flag 'q'"):
        RegexFormat("a", flags="sq")


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


FENCE, RIGHT = "```", "def f(x):\n    return x + 1\n"
BLOCK = f"{FENCE}python\n{RIGHT}{FENCE}\n"
INDENTED = "".join(f"   {line}\n" for line in f"{FENCE}python\n{RIGHT}{FENCE}".splitlines())
DOC = f'def f(x):\n    """Add.\n\n    {FENCE}\n    f(1)\n    {FENCE}\n    """\n    return x + 1\n'
STRING = f'S = """\n{FENCE}\n{FENCE}python\n"""\n{RIGHT}'
ANSWERS = {
    **{
        f"{FENCE}{label}\n{RIGHT}{FENCE}": RIGHT
        for label in "Python py3 ipython {.python} python3.11 python:a.py".split()
    },
    **{f"{FENCE}{label}\n{RIGHT}{FENCE}": RIGHT for label in ("", ' python title="a"')},
    f"{FENCE}`python\n{FENCE}\n{RIGHT}{FENCE}`": f"{FENCE}\n{RIGHT}",
    f"~~~python\n{RIGHT}~~~": RIGHT,
    f"1. So:\n{INDENTED}": RIGHT,
    f"{FENCE}python\n{DOC}{FENCE}": DOC,
    f"{FENCE}python\n{STRING}{FENCE}": STRING,
    f"{FENCE}python\n{RIGHT}": RIGHT,
    f"{BLOCK}Output:\n{FENCE}\n2\n{FENCE}": RIGHT,
    f"{BLOCK}{FENCE}text\n2\n{FENCE}\n{FENCE}bash\npython a.py\n{FENCE}": RIGHT,
    f"{BLOCK}Usage:\n{FENCE}python\nprint(f(1))\n{FENCE}": RIGHT,
    f"{FENCE}\n{RIGHT}{FENCE}\nOutput:\n{FENCE}\n2\n{FENCE}": RIGHT,
    f"{FENCE}python\ndef f(x): return 0\n{FENCE}\nBetter:\n{BLOCK}": RIGHT,
    f"{FENCE}python\ns = '''oops\n{FENCE}\nMended:\n{BLOCK}": RIGHT,
    f"{BLOCK}{FENCE}python\ndef f(x): # cut": RIGHT,
    f"<think>{FENCE}python\nbad\n{FENCE}</think>\n{BLOCK}": RIGHT,
    f"Use {FENCE}def f(x): return x + 1{FENCE}": "def f(x): return x + 1",
    f"<answer>\n{RIGHT}</answer>": f"\n{RIGHT}",
    RIGHT: RIGHT,
}


@pytest.mark.parametrize(("text", "found"), ANSWERS.items(), ids=range(len(ANSWERS)))
def test_the_program_of_an_answer(text: str, found: str):
    assert find_program(text, lambda block: block.count("def f(")) == found
    assert find_program(text.replace("\n", "\r\n"), lambda block: block.count("def f(")) == found.replace("\n", "\r\n")


@pytest.mark.parametrize(
    "unit",
    ["```python\n", "```js\n", "```\n", "``` x\n", "```python\nx\n", " ", "```python` ", '```python\n"""\n', "~~~\n"],
)
def test_it_takes_no_time_on_what_a_degenerate_policy_writes(unit):
    text = unit * (1_000_000 // len(unit))  # in quadratic time this would take hours
    assert last_block(text, ("json",)) == text
    find_program(text, len)


@pytest.mark.parametrize("think", ["", "<think> </think>", "<think>3 and 4</think>", "<think>3 and 4"])
@pytest.mark.parametrize(
    "answer", ["7", "<answer></answer>", "<answer>7</answer>", "<answer>\n$7.0\n</answer>", "<answer>8</answer>"]
)
def test_weighted_functions_are_the_parts_of_torchrls_gsm8k_parser(think, answer):
    parser = GSM8KRewardParser(set_done_if_answer=False)
    theirs = parser._single_correctness_reward("7", *reversed(parser.extract_tags(think + answer)))
    specs = [
        {"_target_": "regex_format", "name": f"reward_{tag}", "pattern": f"<{tag}>.*[^ ].*</{tag}>", "search": True}
        for tag in ("answer", "think")
    ]
    batch = RewardBatch(["3+4?"], [think + answer], [[1]], {"answer": ["7"]})
    right, tagged, thought = (call_reward(load_reward(s), batch).scores[0] for s in ("numeric_match", *specs))
    assert (tagged, thought) == (theirs["reward_answer"], theirs["reward_think"])
    if "<answer>" in answer:  # without the tag, numeric_match reads the last number
        assert right == float(theirs["success"])
        assert 0.9 * right + 0.1 * tagged == pytest.approx(float(theirs["reward"]))
