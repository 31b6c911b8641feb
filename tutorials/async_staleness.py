# %% [markdown]
# # Asynchronous sampling and stale rows
#
# You let an engine sample while the loop trains, first with scripted answers, then with the built-in model.
# You measure how busy the engine is, and how old its tokens are when you train on them.
# At the end you know what `max_staleness` and `ahead` cost, what `policy_version` tells, and what the importance ratio
# corrects.

# %%
import random
import threading
import time

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector, token_staleness
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer, warm_start
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, frozen_copy, load_model, vLLMWrapper
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater, WeightPublisher

torch.manual_seed(0)  # for the buffer's shuffling; the environment and the policy have their own seeds
SCRIPTED_STEPS, STEPS, UPDATES, OLD_PROMPTS = 10, 10, 6, 64

# %% [markdown]
# ## An engine with a script
#
# A `ScriptedEngine` plays answers that you declare, with the latency that you declare. It needs no model, so you can
# study a loop in seconds. This one has 32 places. Half of the answers take less than 0.1 s, one in a hundred takes
# ten times as long.
#
# By default, `LLMCollector` samples each batch with the current weights. Every batch waits for its slowest answer, and
# the engine waits while the loop trains. Here the training is a `sleep`. Two arguments change this:
#
# - `max_staleness=1` also samples the next batch while the loop trains. No token that is trained on is more than one
#   update old. Answers that take longer leave the loss, but stay in the baseline of their group.
# - `ahead=16` begins 16 groups more than a batch needs, here two batches. Their age has no bound.

# %%
tokenizer = build_tokenizer()
prompts = load_prompts(addition_prompts("train"))
TEXT, PLACES, GROUPS = tokenizer("\\boxed{85}<|im_end|>")["input_ids"], 32, 8


def run(**settings):
    """Run a loop of some steps. Return its running requests over time, the age of its tokens, and the counters."""
    rng = random.Random(0)
    engine = ScriptedEngine(
        lambda request, index: ScriptedTurn(TEXT, latency=rng.lognormvariate(-2.5, 1.0)), max_concurrency=PLACES
    )
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32})
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=GROUPS, num_generations=4)
    updater = WeightPublisher(build_model(tokenizer, seed=0), engine, in_flight="continue")
    collector = LLMCollector(env, policy, weight_updater=updater, **settings)

    seen, done = [], threading.Event()

    def watch():
        while not done.wait(0.02):
            engine.tick()
            seen.append((time.monotonic(), engine.request_seconds))

    watcher = threading.Thread(target=watch)
    watcher.start()
    ages = []
    for _ in range(SCRIPTED_STEPS):
        rows = collector.collect()
        ages += token_staleness(rows, collector.policy_version).tolist()
        time.sleep(0.2)  # training
        collector.update_policy_weights_()
    done.set()
    watcher.join()
    collector.shutdown()
    engine.close()
    return seen, ages, collector.counts


results = {"default": run(), "max_staleness=1": run(max_staleness=1), "ahead=16": run(ahead=2 * GROUPS)}

# %% [markdown]
# `request_seconds` grows by the number of running requests each second, so its slope is that number.

# %%
figure, panels = plt.subplots(3, 1, figsize=(7, 5), sharex=True, sharey=True, facecolor="white", layout="constrained")
for axes, (name, (seen, _, _)) in zip(panels, results.items(), strict=True):
    begin, end = seen[0], seen[-1]
    seconds = [(t - begin[0], (b - a) / (t - s)) for (s, a), (t, b) in zip(seen, seen[1:], strict=False)]
    busy = (end[1] - begin[1]) / (end[0] - begin[0]) / PLACES
    axes.fill_between(*zip(*seconds, strict=True), color="tab:blue", alpha=0.7, linewidth=0)
    axes.axhline(PLACES, color="gray", linestyle=":")
    axes.set_title(f"{name}: {busy:.0%} of the places busy, {end[0] - begin[0]:.1f} s", loc="left", fontsize="medium")
panels[1].set_ylabel("running requests")
panels[2].set_xlabel("seconds")
plt.show()

# %% [markdown]
# By default the engine fills, drains to its last answer, and idles. Groups that begin earlier fill these gaps.
# All three runs deliver the same number of rows.
#
# ## The price: staleness
#
# Each token has the version of the weights that sampled it, and `policy_version` of a row is that of its oldest token.
# The publisher spends a new version for every update. The difference to the current version is the *staleness*.
# `token_staleness` returns it for the tokens that are trained on.

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), facecolor="white", layout="constrained")
oldest = max(max(ages) for _, ages, _ in results.values())
colors = ("tab:green", "tab:blue", "tab:orange")
for place, ((name, (_, ages, _)), color) in enumerate(zip(results.items(), colors, strict=True)):
    share = [ages.count(age) / len(ages) for age in range(oldest + 1)]
    at = [age + 0.27 * (place - 1) for age in range(oldest + 1)]
    axes.bar(at, share, 0.25, color=color, label=f"{name}: {sum(ages) / len(ages):.1f} on average")
axes.set(xlabel="staleness of a token (weight updates)", ylabel="share of the tokens", xticks=range(oldest + 1))
axes.legend()
plt.show()
assert set(results["default"][1]) == {0}  # on-policy
assert max(results["max_staleness=1"][1]) <= 1  # as promised
print("tokens beyond the bound:", results["max_staleness=1"][2].get("staleness/masked_tokens", 0))

# %% [markdown]
# With `ahead`, a group begins about `ahead / groups_per_batch` batches before its own, here 2. Groups with a long
# answer get older, because groups are delivered as they complete. With `max_staleness` no token gets older.
# `on_stale` decides about answers that take too long: mask their tokens, sample the group again, or wait.
#
# ## The built-in model
#
# Now the model samples, while the same model trains. Sampling ahead needs a sampler with separate weights, a
# `frozen_copy`. Two batches ahead give rows of several ages. `loss_fn(...).log_ratio` is the log of each row's
# probability under today's weights, over that under the weights that sampled it.

# %%
model, tokenizer = load_model(warm_start(seed=0))
start = {name: value.clone() for name, value in model.state_dict().items()}
sampler = frozen_copy(model)
sampling = {"tokenizer": tokenizer, "generate_kwargs": {"max_new_tokens": 32, "seed": 0}}
loss_fn = RLOOLoss(TransformersWrapper(model, generate=False, **sampling))


def make_env():
    """Return an environment that draws the same prompts each time."""
    return DatasetChatEnv(prompts, tokenizer, prompts_per_batch=16, num_generations=8, rewards=boxed_accuracy)


def train(collector, steps, each=lambda batch, step: None):
    """Train for some steps; call ``each`` with every batch before its update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
    buffer = ReplayBuffer(
        storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
    )
    for step in range(steps):
        buffer.extend(tensor_rows(collector.collect()))
        for batch in buffer:
            each(batch, step)
            accumulate(loss_fn, batch, micro_batch_size=64)
            optimizer_step(model, optimizer, max_grad_norm=1.0)
        buffer.empty()
        collector.update_policy_weights_()
    collector.shutdown()


ages, log_ratios = [], []


def measure(batch, step):
    """Record staleness and log-ratio of each row."""
    with torch.no_grad():
        log_ratios.append(loss_fn(batch).log_ratio)
    ages.append(collector.policy_version - batch["policy_version"])


policy, updater = TransformersWrapper(sampler, **sampling), InProcessWeightUpdater(model, sampler)
collector = LLMCollector(make_env(), policy, ahead=32, weight_updater=updater)
train(collector, STEPS, measure)

# %%
ages, log_ratios = torch.cat(ages), torch.cat(log_ratios)
present = ages.unique().tolist()
figure, axes = plt.subplots(figsize=(7, 3.2), facecolor="white", layout="constrained")
axes.boxplot([log_ratios[ages == age].tolist() for age in present], positions=present, whis=(5, 95), showfliers=False)
axes.axhline(0, color="gray", linestyle=":")
axes.set(xlabel="staleness of a row (weight updates)", ylabel="log importance ratio (nats)")
axes.set_title("boxes: middle half of the rows; whiskers: 5 % to 95 %", fontsize="medium")
plt.show()

# %% [markdown]
# Rows of staleness 0 have a ratio of 1, a log-ratio of 0. The older a row, the more today's model disagrees with the
# model that sampled it, in both directions.
#
# ## What the ratio corrects
#
# An average over old rows describes the old policy. Weighted by the ratio, it estimates what **today's** policy earns:
#
# $$\mathbb{E}_{old}\left[\frac{\pi_{new}}{\pi_{old}} \, r\right] = \mathbb{E}_{new}[r]$$
#
# The gradient in `RLOOLoss` is such an average. The same ratio corrects it. To see it work, sample rows once, train
# the model on others, and estimate its reward from the old rows. Compare with fresh samples of the same prompts.

# %%
model.load_state_dict(start)
sampler.load_state_dict(start)
held = prompts.select(range(OLD_PROMPTS))


def sample(weights):
    """Return rows of the same prompts, sampled by a model."""
    env = DatasetChatEnv(held, tokenizer, prompts_per_batch=OLD_PROMPTS, num_generations=8, rewards=boxed_accuracy)
    return LLMCollector(env, TransformersWrapper(weights, **sampling)).collect()


old = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage())
old.extend(tensor_rows(sample(sampler)))
old = old[:]
rewards = old["next", "reward"].flatten()
estimates = []


def estimate(batch, step):
    """Compare estimates from old rows with fresh samples."""
    with torch.no_grad():
        outputs = loss_fn(old)
    weights = outputs.log_ratio.exp()
    fresh = sample(model)["next", "reward"].mean().item()
    estimates.append((fresh, (weights * rewards).mean().item(), rewards.mean().item(), outputs.ESS.item()))


policy = TransformersWrapper(model, **sampling)
train(LLMCollector(make_env(), policy, weight_updater=InProcessWeightUpdater(model, model)), UPDATES, estimate)

# %%
fresh, weighted, plain, ess = zip(*estimates, strict=True)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), facecolor="white", layout="constrained")
left.plot(fresh, "o-", color="black", label="fresh samples")
left.plot(weighted, "s-", color="tab:blue", label="old rows, weighted by the ratio")
left.plot(plain, "^-", color="tab:orange", label="old rows, not weighted")
left.set(xlabel="updates since the old rows were sampled", ylabel="estimate of the mean reward")
left.legend(fontsize="small")
right.plot(ess, "o-", color="tab:blue")
right.set(
    xlabel="updates since the old rows were sampled", ylabel="effective sample size (share of rows)", ylim=(0, 1.05)
)
for axes in (left, right):
    axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Without weights the estimate stays where the old policy was. With weights it follows the policy, at a price:
# a few rows get large weights, and the effective sample size falls. So the correction works for slightly old rows.
# The clip of `RLOOLoss` bounds what a single ratio can do.
#
# ## What to try next
#
# - Use `in_flight="finish"` in the `WeightPublisher`: an update then waits until the running requests have finished.
# - Give the scripted engine a `max_concurrency` of 64, and find the `ahead` that keeps it busy.
# - Use `on_stale="wait"` with `max_staleness=1`, and compare how busy the engine is.
# - Cut the slowest answers: `LLMCollector(..., min_members=3)` delivers a group once three of its four rows have ended.
# - Replace the clip by a truncated weight: `RLOOLoss(..., old_log_probs="proximal", correction="tis")` with
#   `record_log_probs`.
