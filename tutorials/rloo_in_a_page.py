import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import KLRewardTransform
from torchrl_rloo.modules import TransformersWrapper, frozen_reference, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)  # the buffer shuffles; prompts and samples have seeds of their own

# A small language model that can add two numbers, but seldom writes the answer as asked.
model, tokenizer = load_model(warm_start(seed=0, log=print))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
scorer = policy.get_new_version(generate=False)

# 16 prompts a step, 8 completions of each. A completion earns 1 for the right boxed number, less its KL to the start.
env = DatasetChatEnv(
    load_prompts(addition_prompts("train")),
    tokenizer,
    prompts_per_batch=16,
    num_generations=8,
    rewards=boxed_accuracy,
    after_rewards=[KLRewardTransform(frozen_reference(scorer), kl_to_ref_coeff=0.001)],
)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))

# Rows enter the buffer with their leave-one-out advantage, once their group is complete.
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
loss_fn = RLOOLoss(scorer)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)

for step, rows in enumerate(collector):
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        accumulate(loss_fn, batch, micro_batch_size=64)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    print(f"step {step}: reward {rows['next', 'rewards'].mean():.2f}")
    if step == 25:
        break
