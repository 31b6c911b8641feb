# %% [markdown]
# # Asynchronous sampling and stale rows
#
# You let an engine sample ahead while the loop trains, first with scripted answers, then with the built-in model.
# You measure how busy the engine is, and how old its rows are when you train on them.
# At the end you know what `ahead` costs, what `policy_version` tells, and what the importance ratio corrects.

# %%
import random
import threading
import time

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import AsyncLLMCollector, LLMCollector
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
# `AsyncLLMCollector` begins `ahead` groups more than a batch needs. With `ahead=0` every batch waits for its slowest
# answer, and the engine waits while the loop trains. Here the training is a `sleep`.

# %%
tokenizer = build_tokenizer()
prompts = load_prompts(addition_prompts("train"))
TEXT, PLACES, GROUPS = tokenizer("\\boxed{85}<|im_end|>")["input_ids"], 32, 8


def run(ahead):
    """Run a loop of some steps, and return its running requests over time and the staleness of its rows."""
    rng = random.Random(0)
    engine = ScriptedEngine(
        lambda request, index: ScriptedTurn(TEXT, latency=rng.lognormvariate(-2.5, 1.0)), max_concurrency=PLACES
    )
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32})
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=GROUPS, num_generations=4)
    updater = WeightPublisher(build_model(tokenizer, seed=0), engine, in_flight="continue")
    collector = AsyncLLMCollector(env, policy, ahead=ahead, weight_updater=updater)

    seen, done = [], threading.Event()

    def watch():
        while not done.wait(0.02):
            engine.tick()
            seen.append((time.monotonic(), engine.request_seconds))

    watcher = threading.Thread(target=watch)
    watcher.start()
    staleness = []
    for _ in range(SCRIPTED_STEPS):
        rows = collector.collect()
        staleness += (collector.policy_version - rows["policy_version"]).tolist()
        time.sleep(0.2)  # training
        collector.update_policy_weights_()
    done.set()
    watcher.join()
    collector.shutdown()
    engine.close()
    return seen, staleness


results = {ahead: run(ahead) for ahead in (0, GROUPS, 2 * GROUPS)}

# %% [markdown]
# `request_seconds` grows by the number of running requests each second, so its slope is that number.

# %%
figure, panels = plt.subplots(3, 1, figsize=(7, 5), sharex=True, sharey=True, facecolor="white", layout="constrained")
for axes, (ahead, (seen, _)) in zip(panels, results.items(), strict=True):
    begin, end = seen[0], seen[-1]
    seconds = [(t - begin[0], (b - a) / (t - s)) for (s, a), (t, b) in zip(seen, seen[1:], strict=False)]
    busy = (end[1] - begin[1]) / (end[0] - begin[0]) / PLACES
    axes.fill_between(*zip(*seconds, strict=True), color="tab:blue", alpha=0.7, linewidth=0)
    axes.axhline(PLACES, color="gray", linestyle=":")
    axes.set_title(
        f"ahead={ahead}: {busy:.0%} of the places busy, {end[0] - begin[0]:.1f} s", loc="left", fontsize="medium"
    )
panels[1].set_ylabel("running requests")
panels[2].set_xlabel("seconds")
plt.show()

# %% [markdown]
# Without groups ahead the engine fills, drains to its last answer, and idles. Groups ahead fill these gaps.
# All three runs deliver the same number of rows.
#
# ## The price: staleness
#
# `policy_version` of a row is the version of the weights that sampled its oldest token. The collector counts versions
# as it updates the engine. The difference is the row's *staleness*, in weight updates.

# %%
figure, axes = plt.subplots(figsize=(7, 3.2), facecolor="white", layout="constrained")
oldest = max(max(staleness) for _, staleness in results.values())
colors = ("tab:green", "tab:blue", "tab:orange")
for place, ((ahead, (_, staleness)), color) in enumerate(zip(results.items(), colors, strict=True)):
    share = [staleness.count(age) / len(staleness) for age in range(oldest + 1)]
    mean = sum(staleness) / len(staleness)
    at = [age + 0.27 * (place - 1) for age in range(oldest + 1)]
    axes.bar(at, share, 0.25, color=color, label=f"ahead={ahead}: {mean:.1f} on average")
axes.set(xlabel="staleness of a row (weight updates)", ylabel="share of the rows", xticks=range(oldest + 1))
axes.legend()
plt.show()
assert set(results[0][1]) == {0}  # ahead=0 is on-policy

# %% [markdown]
# A group begins about `ahead / groups_per_batch` batches before its own, here 0, 1 or 2. Groups with a long answer get
# older, because groups are delivered as they complete.
#
# ## The built-in model
#
# Now the model samples, while the same model trains. `ahead` above 0 needs a sampler with its own weights, a
# `frozen_copy`. `loss_fn(...).log_ratio` is the log of each row's probability under today's weights, over that under
# the weights that sampled it.

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
collector = AsyncLLMCollector(make_env(), policy, ahead=32, weight_updater=updater)
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
# - Replace the clip by a truncated weight: `RLOOLoss(..., old_log_probs="proximal", correction="tis")` with
#   `record_log_probs`.
