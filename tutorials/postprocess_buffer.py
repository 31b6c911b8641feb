# %% [markdown]
# # Post-process a replay buffer
#
# You put transforms between the sampled rows and the loss: advantages, filters, selection, and one that you write.
# For each you look at the advantages before and after.
# At the end you know in which order transforms run, what each drops, and how a cache fills the gaps.

# %%
import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer
from torchrl.envs import Compose, Transform

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, stack_rows, tensor_rows
from torchrl_rloo.embedded import addition_prompts, warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import GroupCache, MCAdvantage, RowStorage, TopKSelector, ZeroSignalFilter
from torchrl_rloo.rewards import last_boxed
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

# %% [markdown]
# ## Rows to work on
#
# The built-in model answers 32 prompts, 8 times each. The right number earns 0.5, and the box around it another 0.5.


# %%
def graded(completions, answer, **columns):
    """Return 1 for the right number in a box, 0.5 for the right number without one, else 0."""
    texts = [messages[-1]["content"] for messages in completions]
    return [
        0.5 * (last_boxed(text) == a) + 0.5 * text.rstrip("}").endswith((f" {a}", f"{{{a}"))
        for text, a in zip(texts, answer, strict=True)
    ]


model, tokenizer = load_model(warm_start(seed=0))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
prompts = load_prompts(addition_prompts("train"))
env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=32, num_generations=8, rewards=graded)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
rows = tensor_rows(collector.collect())

rewards = rows["next", "reward"].reshape(32, 8)
print("rewards of the first groups:", *rewards[:4].tolist(), sep="\n")


# %% [markdown]
# ## Advantages arrive with the rows
#
# A transform of a replay buffer changes rows while they are written. `MCAdvantage` holds a row back until its group is
# complete. So rows may come in any order and in any number of batches:

# %%
buffer = ReplayBuffer(storage=RowStorage(), transform=(advantage := MCAdvantage()))
shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
for part in (shuffled[:100], shuffled[100:]):
    buffer.extend(stack_rows([rows[i] for i in part]))
    print(f"{len(part)} rows written: {len(buffer)} in the buffer, {advantage.pending_rows} wait for their group")

# %% [markdown]
# The estimator is a choice: a name, or a function of yours. `rloo` keeps the scale of the rewards.
# `grpo` divides by the standard deviation of the group, so that all groups get advantages of similar size.


# %%
def write(*transforms):
    """Return the rows as a buffer with these transforms holds them."""
    buffer = ReplayBuffer(storage=RowStorage(), transform=Compose(*transforms))
    buffer.extend(rows)
    return buffer[:]


def plot(before, after, titles):
    """Draw histograms of the advantages of two sets of rows."""
    limit = max(part["advantage"].abs().max().item() for part in (before, after)) * 1.05
    bins = [limit * (2 * i / 31 - 1) for i in range(32)]  # 31 of them, with 0 in the middle of one
    figure, panels = plt.subplots(
        1, 2, figsize=(8, 3), sharey=True, sharex=True, facecolor="white", layout="constrained"
    )
    for axes, part, title, color in zip(panels, (before, after), titles, ("tab:gray", "tab:blue"), strict=True):
        values = part["advantage"].flatten()
        axes.hist(values.tolist(), bins=bins, color=color)
        axes.set_title(f"{title}\n{len(values)} rows, {(values == 0).float().mean():.0%} of them 0", fontsize="medium")
        axes.set(xlabel="advantage")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("rows")
    plt.show()


plain = write(MCAdvantage())
plot(plain, write(MCAdvantage(estimator="grpo")), ('estimator="rloo"', 'estimator="grpo"'))

# %% [markdown]
# ## Drop groups without a signal
#
# If all rows of a group earn the same, all their advantages are 0 and the group teaches nothing.
# `ZeroSignalFilter` drops such groups.
#
# **Order:** rows that are *written* pass a `Compose` from last to first. `MCAdvantage` stands last, so it runs first,
# and gives complete groups to the filter.

# %%
signal = ZeroSignalFilter()
informative = write(signal, MCAdvantage())
plot(plain, informative, ("all groups", "groups with a signal"))
print(dict(signal.counts))
assert len(informative["group_id"].unique()) == signal.counts["zero_signal/kept"]

# %% [markdown]
# The loss averages over the rows that it is given, so fewer rows give each of them more weight.
# `accumulate` skips rows of advantage 0 without this effect: it counts all rows of the batch first.
#
# ## Keep the rows that say most
#
# Sampling is often cheaper than training. `TopKSelector` keeps `k` rows of each group: with `by="variance"` those whose
# rewards differ most. The order decides which rows the baseline is computed from:
#
# - `Compose(TopKSelector(4, by="variance"), MCAdvantage())` compares all 8 rows of a group, then drops 4.
# - `Compose(MCAdvantage(), TopKSelector(4, num_generations=8, by="variance"))` drops 4, then compares the others.

# %%
first_compare = write(TopKSelector(4, by="variance"), MCAdvantage())
first_select = write(MCAdvantage(), TopKSelector(4, num_generations=8, by="variance"))
plot(first_compare, first_select, ("compare 8, keep 4", "keep 4, compare 4"))
sums = {name: part["advantage"].sum().item() for name, part in (("compare", first_compare), ("select", first_select))}
print(f"sum of the advantages: {sums['compare']:+.2f} if compared first, {sums['select']:+.2f} if selected first")

# %% [markdown]
# Only if the selection comes first do the advantages of each group sum to zero. If the comparison comes first, each
# advantage is the same as before. Neither is the plain gradient of the mean reward, because selection looks at rewards.
#
# ## A transform of yours
#
# A transform that works on writing has one method, `_inv_call`: rows in, rows out, or None if none are left.
# Pass on None, which comes from a transform that holds its rows back.
#
# This one edits and drops. It halves negative advantages, and drops rows longer than a limit.


# %%
class Gentle(Transform):
    """Halves negative advantages, and drops long rows.

    Args:
        max_tokens: longest completion to keep.
    """

    def __init__(self, max_tokens: int):
        super().__init__()
        self.max_tokens, self.dropped = max_tokens, 0

    def forward(self, tensordict):
        return tensordict  # rows that are sampled stay as they are

    def _inv_call(self, tensordict):
        if tensordict is None:
            return None
        kept = []
        for row in tensordict.unbind(0):
            if row["masks", "all_assistant_mask"].sum() > self.max_tokens:
                self.dropped += 1
                continue
            value = row["advantage"]
            kept.append(row.copy().set("advantage", torch.where(value < 0, 0.5 * value, value)))
        return stack_rows(kept) if kept else None


gentle = Gentle(max_tokens=24)
edited = write(gentle, MCAdvantage())
plot(plain, edited, ("before", f"after: {gentle.dropped} long rows dropped"))
assert edited["advantage"].min() >= plain["advantage"].min() / 2

# %% [markdown]
# `row.copy()` matters: the rows may still be the caller's, and a copy shares the tensors that you do not replace.
#
# ## Fill the gaps from a cache
#
# After filtering, a batch has fewer groups than planned. A `GroupCache` keeps informative groups of earlier steps, and
# fills later batches up. Train one step, sample the next batch, and fill it up to 36 groups:

# %%
loss_fn = RLOOLoss(policy.get_new_version(generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
cache = GroupCache(capacity=32, scorer=loss_fn.actor_network, max_age=4)

cache.add(informative)
accumulate(loss_fn, informative, micro_batch_size=64)
optimizer_step(model, optimizer, max_grad_norm=1.0)
collector.update_policy_weights_()

rows = tensor_rows(collector.collect())
fresh = signal.keep_informative(rows)
filled = cache.fill(fresh, groups=36, policy_version=collector.policy_version)
for name, part in (("sampled", rows), ("with a signal", fresh), ("filled up", filled)):
    age = (collector.policy_version - part["policy_version"]).float().mean()
    print(f"{name:>14}: {len(part['group_id'].unique())} groups, {age:.2f} updates old on average")
print({event: number for event, number in cache.counts.items() if number})

# %% [markdown]
# A cached group comes back with a new `group_id` and its old `policy_version`. Its log-probs are those of the *current*
# model, so the ratio starts at 1, and a clip bounds the step from there. Compare the two for one row:

# %%
replayed = filled[-1]
original = next(row for row in informative.unbind(0) if torch.equal(row["tokens", "full"], replayed["tokens", "full"]))
mask = replayed["masks", "all_assistant_mask"]
for name, row in (("sampled with", original), ("in the cache's copy", replayed)):
    print(f"log-prob of the completion {name:>20}: {row['log_probs', 'full'][mask].sum():.3f}")

# %% [markdown]
# `RefillingCollector` and `GroupSource` do all of this in a loop, with counts and checkpoints. On the command line they
# are `curriculum.refill={}` and `curriculum.cache={capacity:64}`.
#
# ## What to try next
#
# - Write an estimator: any function of `(rewards, groups)` that returns an advantage for each reward.
# - Keep the state of your transform in checkpoints: add `get_extra_state` and `set_extra_state`.
# - Put `Gentle` into the buffer of `first_loop.py`, and compare the curves.
