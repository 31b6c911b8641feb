"""PPO on the built-in task for ``bench_health.py``: a policy and a value head, with the metrics of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, tensor_rows
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.embedded import resolve_task, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import KLRewardTransform
from torchrl_rloo.evaluation import Evaluation
from torchrl_rloo.modules import TransformersWrapper, ValueHead, frozen_reference, load_model
from torchrl_rloo.objectives import PRESETS, RLOOLoss, ValueLoss, merge_outputs
from torchrl_rloo.replay import RowStorage, TokenGAE
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.training import optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

PROMPTS, COMPLETIONS, PASSES = 16, 4, 2


def train(file: Path, seed: int, steps: int, *, critic_lr: float, max_grad_norm: float | None, every: int) -> None:
    """Train with PPO, 64 rows a step, and write a line of metrics for each step.

    The returns of the task are 0 or 1. ``values/mean_abs`` is the mean size of the critic's estimates at the action
    tokens, as its targets were computed with.

    Args:
        file: JSON lines to write.
        seed: seed of the model, its samples and the order of rows.
        steps: number of steps.
        critic_lr: learning rate of the critic; that of the policy is 3e-4.
        max_grad_norm: bound of the critic's gradient norm. None disables it.
        every: steps between evaluations of 128 held-out prompts.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model, tokenizer = load_model(warm_start(seed))
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": seed})
    critic, preset, task = ValueHead(model), PRESETS["ppo"], resolve_task("addition")
    prompts, held_out = task.load(eval_size=128, seed=seed)
    scorer = policy.get_new_version(generate=False)
    env = DatasetChatEnv(
        prompts,
        tokenizer,
        prompts_per_batch=PROMPTS,
        num_generations=COMPLETIONS,
        rewards=boxed_accuracy,
        after_rewards=[KLRewardTransform(frozen_reference(scorer), 0.0)],  # records the log-probs for TokenGAE's KL
    )
    collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
    evaluation = Evaluation(policy, held_out, task.make_scorer(), batch_size=128)
    buffer = ReplayBuffer(
        storage=RowStorage(),
        sampler=SamplerWithoutReplacement(),
        transform=TokenGAE(critic, **preset.advantage_arguments),
        batch_size=PROMPTS * COMPLETIONS // 2,
    )
    policy_loss = RLOOLoss(scorer, **preset.loss_arguments)
    value_loss = ValueLoss(critic)
    optimizers = [
        torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
        for module, lr in ((model, 3e-4), (critic, critic_lr))
    ]
    with file.open("w") as lines:
        lines.write(json.dumps({"step": 0, **evaluation.run().metrics}) + "\n")
        for step in range(1, steps + 1):
            # 1. Sample, and estimate advantages
            rows = collector.collect()
            metrics = completion_metrics(rows, ["boxed_accuracy"], [1.0])
            buffer.extend(tensor_rows(rows))
            values = torch.cat([row[keys.STATE_VALUE][row[keys.ACTION_MASK]].flatten() for row in buffer[:].unbind(0)])
            metrics["values/mean_abs"] = float(values.abs().mean())
            # 2. Train policy and critic
            policies, critics, norms = [], [], []
            for _ in range(PASSES):
                for batch in buffer:
                    policies.append(policy_loss(batch))
                    critics.append(value_loss(batch))
                    (policies[-1].loss + critics[-1].loss).backward()
                    norms.append(float(optimizer_step(model, optimizers[0], None, 1.0)))
                    optimizer_step(critic, optimizers[1], None, max_grad_norm)
            buffer.empty()
            metrics |= merge_outputs(critics, num_updates=len(norms)) | merge_outputs(policies, num_updates=len(norms))
            metrics["grad_norm"] = sum(norms) / len(norms)
            # 3. Update the sampler, and evaluate
            collector.update_policy_weights_()
            if step % every == 0:
                metrics |= evaluation.run().metrics
            lines.write(json.dumps({"step": step, **metrics}) + "\n")
            lines.flush()
    collector.shutdown()
