# %% [markdown]
# # A first RLOO loop
#
# You build a complete training loop: a model, an environment, a collector, a buffer, a loss and an optimizer step.
# The built-in model learns to add two numbers on one CPU core, from a reward of 0 or 1.
# At the end you know what one row of data holds, where its advantage comes from, and which part does what.

# %%
import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)  # for the buffer's shuffling; the environment and the policy have their own seeds
STEPS = 30

# %% [markdown]
# ## Model and policy
#
# `warm_start` builds a small Qwen2 model that imitates a careless teacher: it can add, but often forgets a carry or the
# box around its answer. The first call takes less than a minute, later calls read a cache.
# `load_model` also takes a hub id, such as `Qwen/Qwen2.5-0.5B-Instruct`.
#
# A `TransformersWrapper` makes a policy of a model. It samples completions, and records each token's log-probability.

# %%
model, tokenizer = load_model(warm_start(seed=0))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
print(f"{model.num_parameters():,} parameters")

# %% [markdown]
# ## Environment
#
# The environment draws 16 prompts and repeats each 8 times. The 8 completions of one draw are a *group*.
# `boxed_accuracy` gives 1 if the number in the box equals the prompt's `answer`, else 0.

# %%
prompts = load_prompts(addition_prompts("train"))
print(prompts)
print(prompts[0])

env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=16, num_generations=8, rewards=boxed_accuracy)

# %% [markdown]
# ## Collector
#
# The collector runs the policy in the environment and returns finished rows, always in whole groups.
# Its weight updater brings new weights to the sampler. Here sampler and training model are one and the same.

# %%
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
rows = collector.collect()

print(rows[0]["query"][-1]["content"], "-> right answer:", rows[0]["answer"])
for row in rows[:8]:
    print(f"reward {row['next', 'reward'].item():.0f}  {row['completion'][0]['content']}")

# %% [markdown]
# The model answered the same question 8 times. An answer with a wrong number or without a box earns nothing.
# These differences are all that RLOO needs: no second model judges the answers, and no critic predicts rewards.
#
# A row is a TensorDict. Rows have different lengths, and nothing is padded until a model needs it.

# %%
for key in sorted(rows[0].keys(include_nested=True, leaves_only=True), key=str):
    value = rows[0][key]
    print(f"{str(key):36} {str(list(value.shape)):8} {value.dtype}")

# %% [markdown]
# `("tokens", "full")` holds the exact ids that the policy read and wrote. The assistant mask is True on the tokens that
# it sampled; only these carry gradient. Ids are never encoded again, so the loss reads what was sampled:

# %%
ids, sampled = rows[0]["tokens", "full"], rows[0]["masks", "all_assistant_mask"]
print("context:", repr(tokenizer.decode(ids[~sampled])))
print("sampled:", repr(tokenizer.decode(ids[sampled])))

# %% [markdown]
# ## Buffer and advantages
#
# A row's *advantage* says how much better it was than the others of its group.
# RLOO compares each reward with the mean of the **other** rewards. That is the leave-one-out:
#
# $$A_i = r_i - \frac{1}{G - 1} \sum_{j \ne i} r_j$$
#
# `MCAdvantage` computes this while rows enter the replay buffer. A group waits until all its members have arrived.

# %%
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
buffer.extend(tensor_rows(rows))  # without the text, which no loss reads

group = buffer[:8]
rewards, advantages = group["next", "reward"].flatten(), group["advantage"].flatten()
print("rewards:   ", [f"{r:.0f}" for r in rewards.tolist()])
print("advantages:", [f"{a:+.2f}" for a in advantages.tolist()])

by_hand = [r - (rewards.sum() - r) / 7 for r in rewards]
torch.testing.assert_close(advantages, torch.stack(by_hand))
assert abs(advantages.sum()) < 1e-5  # what lifts one row lowers the others

# %% [markdown]
# ## Loss and one step
#
# The loss scores the sampled tokens under the training model. It multiplies each row's advantage by the probability
# ratio between that model and the sampler, and clips ratios that have moved far.
# Before the first update both are the same model, so the ratio is 1 and nothing is clipped.

# %%
loss_fn = RLOOLoss(policy.get_new_version(generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)

batch = next(iter(buffer))
accumulate(loss_fn, batch, micro_batch_size=64)  # forward and backward, 64 rows at a time
norm = optimizer_step(model, optimizer, max_grad_norm=1.0)
after = loss_fn(batch)
print(f"gradient norm {norm:.2f}; after one step the clip holds {after.clip_fraction.item():.0%} of the rows")

# %% [markdown]
# ## The loop
#
# Each step samples, stores, trains and updates the sampler. You write this loop, so you can change any line of it.

# %%
curve = [rows["next", "reward"].mean().item()]
buffer.empty()
collector.update_policy_weights_()

for step in range(1, STEPS):
    rows = collector.collect()  # 1. sample whole groups
    buffer.extend(tensor_rows(rows))  # 2. compute advantages
    for batch in buffer:  # 3. train on every row once
        accumulate(loss_fn, batch, micro_batch_size=64)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()  # 4. update the sampler
    curve.append(rows["next", "reward"].mean().item())
    if step % 5 == 0:
        print(f"step {step}: reward {curve[-1]:.2f}")

# %%
figure, axes = plt.subplots(figsize=(7, 3.5), facecolor="white", layout="constrained")
axes.plot(curve, ".", color="tab:blue", alpha=0.5, label="one step (128 completions)")
window = min(5, len(curve))
mean = [sum(curve[i : i + window]) / window for i in range(len(curve) - window + 1)]
axes.plot(range(window - 1, len(curve)), mean, color="tab:blue", label=f"mean of the last {window} steps")
axes.set(xlabel="step", ylabel="mean reward (share of right answers)", ylim=(0, 1))
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Every step draws prompts that no earlier step has seen, so the curve does not show answers learned by heart.
# The last group of the last step:

# %%
print(rows[-1]["query"][-1]["content"], "-> right answer:", rows[-1]["answer"])
for row in rows[-8:]:
    print(f"reward {row['next', 'reward'].item():.0f}  {row['completion'][0]['content']}")

# %% [markdown]
# ## What to try next
#
# - Set `num_generations=4` and `prompts_per_batch=32`: as many rows, but each is compared with fewer others.
# - Keep the model near its start: add
#   `after_rewards=[KLRewardTransform(frozen_reference(loss_fn.actor_network), 0.05)]` to the environment.
# - Use your own prompts and rewards: `own_data_and_reward.py` shows how.
