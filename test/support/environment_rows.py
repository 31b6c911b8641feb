"""Rows of an environment, collected twice by a random model: exact tokens, the same bits from the same seed."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.embedded import build_model, build_tokenizer
from torchrl_rloo.modules import TransformersWrapper
from torchrl_rloo.objectives import RLOOLoss


def collect(task: Any, prompts: PromptDataset, *, max_new_tokens: int = 16, **limits: Any) -> TensorDictBase:
    """Return two groups of four rows by a random model, after a check of their log-probs and of a second run."""
    tokenizer = build_tokenizer()
    generate = {"max_new_tokens": max_new_tokens, "seed": 0, "stop_token_ids": list(range(80, 256))}  # short turns
    policy = TransformersWrapper(build_model(tokenizer, seed=0), tokenizer=tokenizer, generate_kwargs=generate)
    runs = []
    for _ in range(2):
        env = task.env(prompts, tokenizer, prompts_per_batch=2, num_generations=4, **limits)
        collector = LLMCollector(env, policy.get_new_version())
        runs.append(collector.collect())
        collector.shutdown()
    first, second = ([row["tokens", "full"].tolist() for row in rows.unbind(0)] for rows in runs)
    assert first == second, "the same seed gave other tokens"
    assert torch.equal(runs[0][keys.REWARD], runs[1][keys.REWARD]), "the same seed gave other rewards"
    batch = tensor_rows(runs[0]).set(keys.ADVANTAGE, torch.ones(8, 1, 1))
    loss = RLOOLoss(policy.get_new_version(generate=False))(batch)
    assert float(loss.log_ratio_max) < 1e-4, f"the log-ratio is {float(loss.log_ratio_max)} with unchanged weights"
    return runs[0]
