# %% [markdown]
# # A method of your own
#
# You write an advantage estimator and a surrogate loss as two plain functions, in about twenty lines.
# You check both against loops in float64, and train the built-in model with them and with RLOO.
# At the end you know the signatures, what a function must handle, and how to compare two methods fairly.

# %%
import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.functional import Clip, EstimatorSpec, leave_one_out
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.training import accumulate, minibatches, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

STEPS = 24
WIDTH = 0.2

# %% [markdown]
# ## An estimator
#
# An estimator gets the rewards `[N]` of complete groups, and the group of each row, `[N]`. It returns `[N]` advantages.
# A NaN reward is a row that abstains: it stays out of every mean, and its advantage is 0.
#
# This one multiplies RLOO's advantages by one minus the mean reward of the group.
# So groups that mostly succeed weigh less than in RLOO.


# %%
def focused(rewards, groups):
    """Return leave-one-out advantages times one minus the mean reward of the group."""

    def group_sum(values):
        return values.new_zeros(int(groups.max()) + 1).index_add(0, groups, values)[groups]

    answered = ~rewards.isnan()
    earned = rewards.nan_to_num(0.0)
    number, total = group_sum(answered.to(earned.dtype)), group_sum(earned)
    baseline = (total - earned) / (number - 1).clamp(min=1)
    advantages = (earned - baseline) * (1 - total / number.clamp(min=1))
    return torch.where(answered & (number > 1), advantages, 0.0)


# %% [markdown]
# ## A surrogate
#
# A surrogate gets log-ratios and advantages, and returns a loss. With `ratio="sequence"` both are `[B, 1]`: one value
# for each row. With `ratio="token"` log-ratios are `[B, A]`: one for each action token.
#
# RLOO clips the ratio, so a row beyond the clip has no gradient. This surrogate pulls the ratio back instead, by a
# quadratic term, as in SPO ([2401.16025](https://arxiv.org/abs/2401.16025)).


# %%
def spring(log_ratio, advantages, log_probs, old_log_probs):
    """Return the loss of ratios that a quadratic term holds near 1."""
    ratio = log_ratio.exp()
    return -(ratio * advantages - advantages.abs() / (2 * WIDTH) * (ratio - 1).square())


# %% [markdown]
# Look at both functions before you train with them. On the left are the advantages of a right answer in a group of 8,
# on the right the losses of one row.

# %%
winners = range(1, 9)
groups = torch.zeros(8, dtype=torch.long)
ratios = torch.linspace(0.5, 1.5, 101)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), facecolor="white", layout="constrained")
for name, estimator, style in (("RLOO", leave_one_out, "o-"), ("focused", focused, "s-")):
    values = [estimator(torch.tensor([1.0] * k + [0.0] * (8 - k)), groups)[0].item() for k in winners]
    left.plot(winners, values, style, label=name)
left.set(xlabel="right answers in the group of 8", ylabel="advantage of a right answer")
left.legend()
for name, surrogate, color in (("clip", Clip(WIDTH), "tab:blue"), ("spring", spring, "tab:orange")):
    for advantage, style in ((1.0, "-"), (-1.0, "--")):
        losses = surrogate(ratios.log(), torch.tensor(advantage), None, None)
        right.plot(ratios, losses, style, color=color, label=f"{name}, advantage {advantage:+.0f}")
right.axvline(1, color="gray", linestyle=":")
right.set(xlabel="ratio of a row", ylabel="loss of a row")
right.legend(fontsize="small")
plt.show()

# %% [markdown]
# Where the ratio is 1, both surrogates have the same slope: minus the advantage. So they only differ after the first
# update on a batch.
#
# ## Check the estimator
#
# Write the definition again as plain loops over Python floats, which are float64. Compare on random groups of different
# sizes, with rows that abstain.


# %%
def focused_by_loops(rewards, groups):
    """Return the same advantages, one row at a time."""
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        others = [r for j, (r, g) in enumerate(zip(rewards, groups, strict=True)) if g == group and j != i and r == r]
        if reward != reward or not others:
            result.append(0.0)
            continue
        mean = (sum(others) + reward) / (len(others) + 1)
        result.append((reward - sum(others) / len(others)) * (1 - mean))
    return result


generator = torch.Generator().manual_seed(0)
for _ in range(20):
    rewards = torch.rand(40, generator=generator, dtype=torch.float64)
    rewards[torch.rand(40, generator=generator) < 0.1] = torch.nan
    groups = torch.randint(7, (40,), generator=generator)
    expected = torch.tensor(focused_by_loops(rewards.tolist(), groups.tolist()), dtype=torch.float64)
    torch.testing.assert_close(focused(rewards, groups), expected)
print("the estimator equals its loops")

# %% [markdown]
# ## Check the loss
#
# `RLOOLoss` takes the surrogate in place of its clip. Sample rows, move the model by one step so that ratios leave 1,
# and compute the loss again in float64, row by row. `gradcheck` tests the surrogate's gradient.

# %%
folder = warm_start(seed=0)
prompts = load_prompts(addition_prompts("train"))


def make_parts(estimator, surrogate):
    """Return a fresh model with collector, buffer, loss and optimizer."""
    torch.manual_seed(0)
    model, tokenizer = load_model(folder)
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=16, num_generations=8, rewards=boxed_accuracy)
    collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
    buffer = ReplayBuffer(
        storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(estimator=estimator)
    )
    loss_fn = RLOOLoss(policy.get_new_version(generate=False), surrogate=surrogate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
    return model, collector, buffer, loss_fn, optimizer


model, collector, buffer, loss_fn, optimizer = make_parts(focused, spring)
buffer.extend(tensor_rows(collector.collect()))
batch = buffer[:]
accumulate(loss_fn, batch)
optimizer_step(model, optimizer, max_grad_norm=1.0)

with torch.no_grad():
    loss = loss_fn(batch).loss.item()
    scored = loss_fn.actor_network.score(batch)
total = 0.0
for row, log_probs, mine in zip(batch.unbind(0), scored.log_probs.double(), scored.actions.mask, strict=True):
    old = row["log_probs", "full"][row["masks", "all_assistant_mask"]].double()
    ratio = (log_probs[mine].sum() - old.sum()).exp().item()
    advantage = row["advantage"].item()
    total -= ratio * advantage - abs(advantage) / (2 * WIDTH) * (ratio - 1) ** 2
print(f"loss {loss:.6f}, by loops {total / len(batch):.6f}")
assert abs(loss - total / len(batch)) < 1e-5

log_ratio = torch.linspace(-0.5, 0.5, 6, dtype=torch.float64).reshape(6, 1).requires_grad_()
advantages = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(6, 1)
assert torch.autograd.gradcheck(lambda x: spring(x, advantages, None, None), log_ratio)

# %% [markdown]
# ## Compare
#
# A fair comparison changes nothing else: the same start, prompts, sampling seeds, learning rate and updates.
# Each batch is split into two updates, so that ratios matter.
#
# `EstimatorSpec` tells other parts about the function: a row without another to compare with gets no signal.


# %%
def train(estimator, surrogate):
    """Return the mean reward of every step."""
    model, collector, buffer, loss_fn, optimizer = make_parts(estimator, surrogate)
    curve = []
    for _ in range(STEPS):
        rows = collector.collect()
        curve.append(rows["next", "reward"].mean().item())
        buffer.extend(tensor_rows(rows))
        for batch in minibatches(buffer, 2):
            accumulate(loss_fn, batch)
            optimizer_step(model, optimizer, max_grad_norm=1.0)
        buffer.empty()
        collector.update_policy_weights_()
    return curve


curves = {
    "RLOO with a clip": train("rloo", Clip(WIDTH)),
    "focused, with a spring": train(EstimatorSpec(focused, needs_group=True), spring),
}

# %%
window = min(5, STEPS)
figure, axes = plt.subplots(figsize=(7, 3.5), facecolor="white", layout="constrained")
for (name, curve), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
    mean = torch.tensor(curve).unfold(0, window, 1).mean(1)
    axes.plot(curve, ".", color=color, alpha=0.4)
    axes.plot(range(window - 1, STEPS), mean, color=color, label=name)
    print(f"{name}: {curve[0]:.2f} -> {mean[-1]:.2f}")
axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
axes.set_title(f"dots: one step; lines: mean of the last {window} steps", fontsize="medium")
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Both learn. One seed on one small task does not say which is better. [Methods](../methods.md) shows how much seeds of
# one method differ.
#
# ## What to try next
#
# - Repeat the comparison with three seeds: change the seeds of `warm_start`, of the environment and of the policy.
# - Give `spring` a method `clipped` by making it a class, and the loss reports clip fractions.
# - Copy the recipe with `torchrl-rloo cp rloo mine.py`, and pass both functions there, to train and evaluate at scale.
