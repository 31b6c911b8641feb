"""A run whose rewards hang, raise, return NaN and crash on one sample in a hundred loses those scores and no others."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Sequence

import cloudpickle
import torch
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

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a test file is no module that a worker can import

BATCHES, PROMPTS, GROUP = 6, 8, 8


def share_of(ids: Sequence[int]) -> int:
    """Which hundredth of all samples this one belongs to."""
    return int(hashlib.sha256(str(list(ids)).encode()).hexdigest(), 16) % 100


def hangs(completion_ids, **_):
    if any(share_of(ids) == 0 for ids in completion_ids):
        time.sleep(1000)
    return [0.25] * len(completion_ids)


def raises(completion_ids, **_):
    if any(share_of(ids) == 1 for ids in completion_ids):
        raise ZeroDivisionError("by chance")
    return [0.5] * len(completion_ids)


def returns_nan(completion_ids, **_):
    return [math.nan if share_of(ids) == 2 else 0.125 for ids in completion_ids]


def crashes(completion_ids, **_):
    if any(share_of(ids) == 3 for ids in completion_ids):
        ctypes.string_at(0)
    return [1.0] * len(completion_ids)


KINDS = {"hangs": "timed_out", "raises": "raised", "returns_nan": "not_finite", "crashes": "worker_died"}
SCORES = {"hangs": 0.25, "raises": 0.5, "returns_nan": 0.125, "crashes": 1.0}


def test_a_run_with_bad_rewards_loses_exactly_the_bad_samples_scores(tokenizer, model, tmp_path, caplog):
    path = tmp_path / "bad.jsonl"
    functions = [hangs, raises, returns_nan, crashes, boxed_accuracy]
    rewards = RewardTransform(functions, executor=ProcessExecutor(workers=2, timeout=4.0), quarantine=path)
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=PROMPTS * BATCHES)),
        tokenizer,
        prompts_per_batch=PROMPTS,
        num_generations=GROUP,
        rewards=rewards,
        epochs=1,
    )
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8, "seed": 0})
    collector = LLMCollector(env, policy)
    with caplog.at_level(logging.WARNING):
        rows = [row for batch in collector for row in batch.unbind(0)]
    collector.shutdown()
    assert len(rows) == BATCHES * PROMPTS * GROUP

    ids = [row[keys.TOKENS][row[keys.ACTION_MASK]].tolist() for row in rows]
    scores = torch.stack([row[keys.REWARDS] for row in rows])
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    for k, (name, kind) in enumerate(KINDS.items()):
        bad = {i for i, sampled in enumerate(ids) if share_of(sampled) == k}
        assert bad, "no sample of this run is bad: the test shows nothing"
        assert {i for i, score in enumerate(scores[:, k].tolist()) if math.isnan(score)} == bad
        assert {score for score in scores[:, k].tolist() if not math.isnan(score)} == {SCORES[name]}
        assert rewards.counts[f"{name}/{kind}"] == len(bad)
        quarantined = [line for line in kept if line["function"] == name]
        assert {line["kind"] for line in quarantined} == {kind}
        assert {tuple(line["completion_ids"]) for line in quarantined} == {tuple(ids[i]) for i in bad}
        assert f"reward {name}: {kind} on" in caplog.text
    assert not scores[:, 4].isnan().any()
    assert {name.partition("/")[2] for name in rewards.counts} <= {*KINDS.values(), "duplicates"}
    assert rewards.latency["hangs/call"].longest >= 1.0 and rewards.latency["raises/call"].n >= 0.9 * len(rows)
    assert "in crashes" in next(line["traceback"] for line in kept if line["kind"] == "worker_died")
    assert "in hangs" in next(line["traceback"] for line in kept if line["kind"] == "timed_out")

    buffer = ReplayBuffer(
        storage=LazyStackStorage(len(rows)),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(GROUP),
        batch_size=len(rows),
    )
    buffer.extend(tensor_rows(stack_rows(rows)))
    assert torch.stack([row[keys.ADVANTAGE].reshape(()) for row in buffer.sample().unbind(0)]).isfinite().all()
