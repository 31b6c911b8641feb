import torch
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)  # the buffer shuffles; prompts and samples have seeds of their own

# A small language model that can add two numbers, but seldom says so in the right way.
model, tokenizer = load_model(warm_start(seed=0, log=print))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})

# 16 prompts a step, 8 completions of each; a completion earns 1 if the number in its box is right.
prompts = load_prompts(addition_prompts("train"))
env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=16, num_generations=8, rewards=boxed_accuracy)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))

# Rows enter the buffer with their leave-one-out advantage, once their group is complete.
buffer = ReplayBuffer(
    storage=LazyStackStorage(128),
    sampler=SamplerWithoutReplacement(),
    transform=MCAdvantage(num_generations=8),
    batch_size=128,
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False), clip_epsilon=0.2)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)

for step, rows in enumerate(collector):
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        loss_fn(batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    buffer.empty()
    collector.update_policy_weights_()
    print(f"step {step}: reward {rows['next', 'reward'].mean():.2f}")
    if step == 25:
        break
