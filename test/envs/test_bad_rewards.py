"""Runs whose rewards hang, raise, return NaN or crash on one sample in a hundred: only those scores are lost."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import sys
import time

import cloudpickle
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, tensor_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import addition_prompts
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.rewards.executors import ProcessExecutor

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker cannot import a test file as a module

BATCHES, PROMPTS, GROUP = 2, 8, 8


class Bad:
    """Reward that fails on one completion in a given way."""

    def __init__(self, kind: str, ids: list[int]):
        self.__name__, self.ids = kind, ids

    def __call__(self, completion_ids, **_):
        if self.ids in completion_ids:
            if self.__name__ == "hangs":
                time.sleep(1000)
            elif self.__name__ == "raises":
                raise ZeroDivisionError("by chance")
            elif self.__name__ == "crashes":
                ctypes.string_at(0)
        nan = self.__name__ == "returns_nan"
        return [math.nan if nan and ids == self.ids else SCORES[self.__name__] for ids in completion_ids]


KINDS = {"hangs": "timed_out", "raises": "raised", "returns_nan": "not_finite", "crashes": "worker_died"}
SCORES = {"hangs": 0.25, "raises": 0.5, "returns_nan": 0.125, "crashes": 1.0}


def collect(tokenizer, model, rewards: RewardTransform | None) -> list[TensorDictBase]:
    """Collect the rows of all batches, the same at every call."""
    prompts = load_prompts(addition_prompts("train", size=PROMPTS * BATCHES))
    sizes = {"prompts_per_batch": PROMPTS, "num_generations": GROUP, "epochs": 1}
    env = DatasetChatEnv(prompts, tokenizer, rewards=rewards, **sizes)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8, "seed": 0})
    collector = LLMCollector(env, policy)
    rows = [row for batch in collector for row in batch.unbind(0)]
    collector.shutdown()
    return rows


def sampled(row: TensorDictBase) -> list[int]:
    return row[keys.TOKENS][row[keys.ACTION_MASK]].tolist()


def test_a_run_with_bad_rewards_loses_exactly_the_bad_samples_scores(tokenizer, model, tmp_path, caplog):
    path = tmp_path / "bad.jsonl"
    ids = [sampled(row) for row in collect(tokenizer, model, None)]
    once = [each for each in ids if ids.count(each) == 1]
    functions = [*(Bad(kind, once[10 * k]) for k, kind in enumerate(KINDS)), boxed_accuracy]
    rewards = RewardTransform(functions, executor=ProcessExecutor(workers=2, timeout=15.0), quarantine=path)
    with caplog.at_level(logging.WARNING):
        rows = collect(tokenizer, model, rewards)
    assert [sampled(row) for row in rows] == ids and len(rows) == BATCHES * PROMPTS * GROUP

    scores = torch.stack([row[keys.REWARDS] for row in rows])
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    for k, (name, kind) in enumerate(KINDS.items()):
        bad = {ids.index(functions[k].ids)}
        assert {i for i, score in enumerate(scores[:, k].tolist()) if math.isnan(score)} == bad
        assert {score for score in scores[:, k].tolist() if not math.isnan(score)} == {SCORES[name]}
        assert rewards.counts[f"rewards/{name}/{kind}"] == len(bad)
        quarantined = [line for line in kept if line["function"] == name]
        assert {line["kind"] for line in quarantined} == {kind}
        assert {tuple(line["completion_ids"]) for line in quarantined} == {tuple(ids[i]) for i in bad}
        assert f"reward {name}: {kind} on" in caplog.text
    assert not scores[:, 4].isnan().any()
    assert {name.split("/")[2] for name in rewards.counts} <= {*KINDS.values(), "duplicates"}
    assert rewards.latency["hangs/call"].longest >= 1.0 and rewards.latency["raises/call"].n >= 0.9 * len(rows)
    assert "in __call__" in next(line["traceback"] for line in kept if line["kind"] == "worker_died")
    assert "in __call__" in next(line["traceback"] for line in kept if line["kind"] == "timed_out")

    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(rows)),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(GROUP),
        batch_size=len(rows),
    )
    buffer.extend(tensor_rows(stack_rows(rows)))
    assert torch.stack([row[keys.ADVANTAGE].reshape(()) for row in buffer.sample().unbind(0)]).isfinite().all()
