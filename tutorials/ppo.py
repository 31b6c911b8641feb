"""PPO with a critic: the loop of the README with a value head, TokenGAE and a second loss.

    python tutorials/ppo.py          about two minutes on one CPU core after the warm start

Critic-free methods compare the completions of a prompt. PPO instead learns the expected return at each token. Rows,
buffer and policy loss are the same.
"""

import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import KLRewardTransform
from torchrl_rloo.modules import TransformersWrapper, ValueHead, frozen_reference, load_model
from torchrl_rloo.objectives import PRESETS, RLOOLoss, ValueLoss
from torchrl_rloo.replay import RowStorage, TokenGAE
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.weight_update import InProcessWeightUpdater

STEPS, PROMPTS, COMPLETIONS, PASSES = 40, 32, 4, 2

# Model, policy and critic
torch.manual_seed(0)
model, tokenizer = load_model(warm_start(seed=0, log=print))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
scorer = policy.get_new_version(generate=False)
critic = ValueHead(model)  # a copy of the model with a scalar head

# Environment and collector. The KL transform, with coefficient 0, records the log-probs for TokenGAE's KL
preset = PRESETS["ppo"]
env = DatasetChatEnv(
    load_prompts(addition_prompts("train")),
    tokenizer,
    prompts_per_batch=PROMPTS,
    num_generations=COMPLETIONS,
    rewards=boxed_accuracy,
    after_rewards=[KLRewardTransform(frozen_reference(scorer), 0.0)],
)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))

# Buffer, losses and optimizer
buffer = ReplayBuffer(
    storage=RowStorage(),
    sampler=SamplerWithoutReplacement(),
    transform=TokenGAE(critic, **preset.advantage_arguments),
    batch_size=PROMPTS * COMPLETIONS // 2,
)
policy_loss, value_loss = RLOOLoss(scorer, **preset.loss_arguments), ValueLoss(critic)
optimizer = torch.optim.AdamW(
    [{"params": list(model.parameters()), "lr": 3e-4}, {"params": list(critic.parameters()), "lr": 1e-3}],
    betas=(0.9, 0.99),
    weight_decay=0.0,
)

for step, rows in enumerate(collector, 1):
    # 1. Compute advantages of the sampled rows
    buffer.extend(tensor_rows(rows))
    # 2. Optimize policy and critic
    for _ in range(PASSES):
        for batch in buffer:
            value = value_loss(batch)
            (policy_loss(batch).loss + value.loss).backward()
            for parameters in (model.parameters(), critic.parameters()):
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    buffer.empty()
    # 3. Update the policy's weights
    collector.update_policy_weights_()
    explained = float(value.explained_variance)
    print(f"step {step}: reward {rows['next', 'reward'].mean():.2f}, explained variance {explained:.2f}")
    if step == STEPS:
        break
