"""PackedRows: rows of real collections and of any structure, packed, pickled and restored."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_tensorclass
from torchrl.data.llm import History
from torchrl.modules.llm.policies import Text

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.data.packed import PackedRows, pack_rows, unpack_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.segments import stash_segment
from torchrl_rloo.data.templates import from_history, to_history
from torchrl_rloo.embedded import CALCULATOR, GUESSING, addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper

TOKENIZER = build_tokenizer()


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


def check_round_trip(rows: TensorDictBase, protocol: int = 4) -> PackedRows:
    packed = pack_rows(rows)
    received = pickle.loads(pickle.dumps(packed, protocol=protocol))
    for restored in (unpack_rows(packed), unpack_rows(received)):
        assert restored.batch_size == rows.batch_size
        for row, again in zip(rows.unbind(0), restored.unbind(0), strict=True):
            check_same(row, again)
    return received


def addition() -> TensorDictBase:
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=8)),
        TOKENIZER,
        prompts_per_batch=2,
        num_generations=2,
        input_mode="history",
        transforms=[FeedbackTransform(lambda c, row: [{"role": "user", "content": "again"}], max_turns=2)],
    )
    kwargs = {"max_new_tokens": 4, "ignore_eos": True, "stop_token_ids": list(range(0, 320, 2))}
    model = build_model(TOKENIZER, seed=0)
    policy = TransformersWrapper(model, tokenizer=TOKENIZER, generate_kwargs=kwargs, input_mode="history")
    rows = LLMCollector(env, policy).collect()
    for row in rows.unbind(0):
        row.set("messages", to_history([row[keys.QUERY]])[0])
        row.set("text", Text(prompt="a", full="ab"))
    return rows


def play(task: Any, say: Any) -> TensorDictBase:
    train, _ = task.load(eval_size=1, limit=4)
    env = task.env(train, TOKENIZER, prompts_per_batch=4)

    def turn(request, index) -> ScriptedTurn:
        return ScriptedTurn(TOKENIZER(say(TOKENIZER.decode(request.prompt), index) + "<|im_end|>")["input_ids"])

    with ScriptedEngine(turn) as engine:
        return LLMCollector(env, vLLMWrapper(engine, tokenizer=TOKENIZER, generate_kwargs={})).collect()


def calculator() -> TensorDictBase:
    return play(CALCULATOR, lambda text, i: f"<tool>{re.search(r'What is (.+?)[?]', text)[1]}</tool>" if i else "1")


def guessing() -> TensorDictBase:
    return play(GUESSING, lambda text, i: f"<think></think>{40 + i}")


def split() -> TensorDictBase:
    rows = list(addition().unbind(0))
    for row in rows[1:3]:  # rows without and with previous segments
        stash_segment(row)
    return stack_rows(rows)


@pytest.mark.parametrize("collect", [addition, calculator, guessing, split])
def test_rows_of_a_collection_return_as_they_were(collect: Any) -> None:
    rows = collect()
    received = check_round_trip(rows)
    assert received.shapes[keys.TOKENS].shape == (len(rows), 1)
    if collect is split:
        assert len(received.layouts) == 2 and len(received.shapes[keys.PREVIOUS_SEGMENTS, "tokens"]) == 2
    if collect is addition:
        assert isinstance(received.columns["messages"][0], History)


_DTYPES = {"i": torch.int64, "b": torch.bool, "f": torch.float32, "h": torch.bfloat16}
_NAMES = st.sampled_from("abcd")


@st.composite
def _tensors(draw: Any) -> tuple[str, torch.Tensor]:
    kind, dims = draw(st.sampled_from(sorted(_DTYPES))), draw(st.integers(0, 2))
    shape = draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
    return f"{kind}{dims}", torch.randint(0, 9, shape).to(_DTYPES[kind])


@st.composite
def _rows(draw: Any, depth: int = 1) -> TensorDictBase:
    row = TensorDict({}, [])
    for name, value in draw(st.lists(_tensors(), max_size=3)):
        row.set(name, value)
    for name, value in draw(st.dictionaries(_NAMES, st.one_of(st.text(), st.none(), st.lists(st.integers())))).items():
        row.set(f"text_{name}", NonTensorData(value))
    if depth:
        for name, value in draw(st.dictionaries(_NAMES, _rows(depth - 1), max_size=2)).items():
            row.set(name, value)
    return row


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(_rows(), min_size=1, max_size=5), protocol=st.sampled_from([4, 5]))
def test_rows_of_any_structure_return_as_they_were(rows: list[TensorDictBase], protocol: int) -> None:
    check_round_trip(stack_rows(rows), protocol)


def test_a_pickle_holds_the_rows_and_nothing_else_of_their_storage() -> None:
    part = torch.arange(1_000_000)[:3]
    assert len(pickle.dumps(pack_rows(stack_rows([TensorDict(ids=part)])))) < 2000


def test_unpacked_rows_are_views_of_the_received_bytes() -> None:
    buffers: list[pickle.PickleBuffer] = []
    packed = pack_rows(stack_rows([TensorDict(ids=torch.arange(n)) for n in (5, 3)]))
    message = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    shared = [bytearray(buffer.raw()) for buffer in buffers]
    rows = unpack_rows(pickle.loads(message, buffers=shared))
    for buffer in shared:
        buffer[:] = bytes(len(buffer))
    assert rows[0]["ids"].tolist() == [0] * 5 and rows[1]["ids"].tolist() == [0] * 3


def test_rows_that_cannot_be_packed_are_refused() -> None:
    rows = stack_rows([TensorDict(x=torch.zeros(1)), TensorDict(x=torch.zeros(1, dtype=torch.int64))])
    with pytest.raises(ValueError, match="key='x' must have one dtype"):
        pack_rows(rows)
    with pytest.raises(ValueError, match="no rows to pack"):
        pack_rows(rows[:0])
