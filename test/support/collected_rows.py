"""Rows of real collections and of any structure, and their comparison."""

from __future__ import annotations

import re
from typing import Any

import torch
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensorclass
from torchrl.data.llm import History
from torchrl.modules.llm.policies import Text

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.segments import stash_segment
from torchrl_rloo.data.templates import from_history, to_history
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.embedded.resolve import CALCULATOR, GUESSING
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper


def addition() -> TensorDictBase:
    """Collect rows of two turns with histories and text."""
    tokenizer = build_tokenizer()
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=8)),
        tokenizer,
        prompts_per_batch=2,
        num_generations=2,
        input_mode="history",
        transforms=[FeedbackTransform(lambda c, row: [{"role": "user", "content": "again"}], max_turns=2)],
    )
    kwargs = {"max_new_tokens": 4, "ignore_eos": True, "stop_token_ids": list(range(0, 320, 2))}
    model = build_model(tokenizer, seed=0)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=kwargs, input_mode="history")
    rows = LLMCollector(env, policy).collect()
    for row in rows.unbind(0):
        row.set("messages", to_history([row[keys.QUERY]])[0])
        row.set("text", Text(prompt="a", full="ab"))
    return rows


def _play(task: Any, say: Any) -> TensorDictBase:
    tokenizer = build_tokenizer()
    train, _ = task.load(eval_size=1, limit=4)
    env = task.env(train, tokenizer, prompts_per_batch=4)

    def turn(request, index) -> ScriptedTurn:
        return ScriptedTurn(tokenizer(say(tokenizer.decode(request.prompt), index) + "<|im_end|>")["input_ids"])

    with ScriptedEngine(turn) as engine:
        return LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={})).collect()


def calculator() -> TensorDictBase:
    """Collect rows with tool calls."""
    return _play(CALCULATOR, lambda text, i: f"<tool>{re.search(r'What is (.+?)[?]', text)[1]}</tool>" if i else "1")


def guessing() -> TensorDictBase:
    """Collect rows of a game of several turns."""
    return _play(GUESSING, lambda text, i: f"<think></think>{40 + i}")


def split() -> TensorDictBase:
    """Collect rows of which some have several samples."""
    rows = list(addition().unbind(0))
    for row in rows[1:3]:  # rows without and with previous segments
        stash_segment(row)
    return stack_rows(rows)


_DTYPES = {"i": torch.int64, "b": torch.bool, "f": torch.float32, "h": torch.bfloat16}
_NAMES = st.sampled_from("abcd")


@st.composite
def _tensors(draw: Any) -> tuple[str, torch.Tensor]:
    kind, dims = draw(st.sampled_from(sorted(_DTYPES))), draw(st.integers(0, 2))
    shape = draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
    return f"{kind}{dims}", torch.randint(0, 9, shape).to(_DTYPES[kind])


@st.composite
def any_row(draw: Any, depth: int = 1) -> TensorDictBase:
    """Draw a row of any structure."""
    row = TensorDict({}, [])
    for name, value in draw(st.lists(_tensors(), max_size=3)):
        row.set(name, value)
    for name, value in draw(st.dictionaries(_NAMES, st.one_of(st.text(), st.none(), st.lists(st.integers())))).items():
        row.set(f"text_{name}", NonTensorData(value))
    if depth:
        for name, value in draw(st.dictionaries(_NAMES, any_row(depth - 1), max_size=2)).items():
            row.set(name, value)
    return row


def check_same(a: Any, b: Any) -> None:
    """Check that two entries are of one type and equal, in the order of their entries."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
    elif isinstance(a, NonTensorData):
        check_same(a.data, b.data)
    elif isinstance(a, History):
        assert from_history(a) == from_history(b)
    elif is_tensorclass(a):
        assert a.batch_size == b.batch_size and a._non_tensordict == b._non_tensordict
        check_same(a._tensordict, b._tensordict)
    elif isinstance(a, TensorDictBase):
        assert a.batch_size == b.batch_size and list(a.keys()) == list(b.keys())
        for name in a.keys():
            check_same(a._get_str(name, None), b._get_str(name, None))
    else:
        assert a == b


def check_same_rows(one: TensorDictBase, other: TensorDictBase) -> None:
    """Check that batches have equal rows in the same order."""
    assert len(one) == len(other)
    for a, b in zip(one.unbind(0), other.unbind(0), strict=True):
        check_same(a, b)
