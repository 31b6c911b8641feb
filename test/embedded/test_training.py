"""A few RLOO steps on the multi-turn tasks, from the warm start to the evaluation."""

from __future__ import annotations

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.embedded import resolve_task, warm_start
from torchrl_rloo.evaluation import Evaluation
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.weight_update import InProcessWeightUpdater


def train(name: str, start, steps: int = 2) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Train for some steps; return all weights, the last step's rewards and the metrics of four held-out prompts."""
    task = resolve_task(name)
    prompts, held_out = task.load(eval_size=4, limit=16)
    model, tokenizer = load_model(start)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 14, "seed": 0})
    env = task.env(prompts, tokenizer, prompts_per_batch=2, num_generations=4)
    collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(4))
    loss_fn = RLOOLoss(policy.get_new_version(generate=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        rows = collector.collect()
        buffer.extend(tensor_rows(rows))
        batch = buffer[:].set(keys.ADVANTAGE, torch.randn(8, 1, 1, generator=torch.Generator().manual_seed(0)))
        out = loss_fn(batch)  # such a poor model may earn no reward, and then there is no gradient
        assert out.log_ratio_max.item() == pytest.approx(0.0, abs=1e-4)  # the mask covers the sampled tokens
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty()
        collector.update_policy_weights_()
    evaluation = Evaluation(
        policy, held_out, task.make_scorer(), make_transforms=task.make_transforms, env_kwargs=task.limits
    )
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, rows[keys.REWARD], evaluation.run().values


@pytest.mark.parametrize("name", ["calculator", "guessing"])
def test_the_same_seed_gives_the_same_run(name, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = warm_start(0, name, steps=10, cache_dir=tmp_path)
        (weights, rewards, metrics), again = train(name, start), train(name, start)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(weights, again[0]) and torch.equal(rewards, again[1]) and metrics == again[2]
    assert {"greedy", "sampled"} <= metrics.keys() and rewards.isfinite().all()
    before = torch.cat([p.detach().flatten() for p in load_model(start)[0].parameters()])
    assert not torch.equal(weights, before)
