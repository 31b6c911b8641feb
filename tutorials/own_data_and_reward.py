# %% [markdown]
# # Your own data and rewards
#
# You write a small dataset to a file, load it, and score completions with two reward functions.
# One of them reads a column of the dataset, and abstains on rows that have no label.
# At the end you know how data and rewards fit together, in Python and on the command line.

# %%
import json
import random
import re
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import load_prompts, tensor_rows
from torchrl_rloo.embedded import warm_start
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import RewardTransform
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)  # for the buffer's shuffling; the environment and the policy have their own seeds
STEPS = 40

# %% [markdown]
# ## A dataset in a file
#
# A dataset is a list of rows with the same columns. JSON lines, JSON, Parquet, CSV, a folder from `save_to_disk` and
# the name of a hub dataset all work. This one asks for sums. Every fourth row has no label, as real data often do.

# %%
rng = random.Random(0)
folder = Path(tempfile.mkdtemp())
with open(folder / "sums.jsonl", "w") as file:
    for number in range(400):
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        row = {"question": f"What is {a}+{b}?", "total": None if number % 4 == 0 else a + b, "source": "made up"}
        file.write(json.dumps(row) + "\n")

print((folder / "sums.jsonl").read_text()[:220])

# %% [markdown]
# ## Load it
#
# `prompt_column` names the prompt. `column_map` renames columns, here `total` to `answer`, and `columns` says which to
# keep for rewards. `system_prompt` is put before each question, and makes chat messages of the texts.
#
# `row_map` takes any function from a row to a row, for example one that cuts the answer out of a long solution.

# %%
prompts = load_prompts(
    folder / "sums.jsonl",
    prompt_column="question",
    column_map={"total": "answer"},
    columns=["answer"],
    system_prompt="Think, then put the answer in \\boxed{}.",
)
print(prompts)
print(prompts[1])

# %% [markdown]
# ## Rewards
#
# A reward is a plain function with TRL's signature: lists in, a list of numbers out, one entry for each completion.
# A completion is a list of messages, and every column of the dataset arrives under its name.
# Rewards that you wrote for TRL work unchanged.
#
# `None` abstains: this function has no opinion on this completion.


# %%
def right_number(completions, answer, **columns):
    """Return 1 where the last number of a completion is the answer; abstain where there is no answer."""
    scores = []
    for messages, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", messages[-1]["content"])
        scores.append(None if expected is None else float(numbers[-1:] == [str(expected)]))
    return scores


def in_a_box(completions, **columns):
    """Return 1 where a completion ends with a box."""
    return [float(bool(re.search(r"\\boxed\{\d+\}$", messages[-1]["content"]))) for messages in completions]


# Reward functions are easy to test without a model.
said = [[{"role": "assistant", "content": text}] for text in ("\\boxed{12}", "The answer is 12", "\\boxed{13}")]
print("right_number:", right_number(said, answer=[12, 12, None]))
print("in_a_box:    ", in_a_box(said))

# %% [markdown]
# A `RewardTransform` adds the rewards with weights. The environment checks at once that the dataset has the columns:

# %%
model, tokenizer = load_model(warm_start(seed=0))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 32, "seed": 0})
unlike = load_prompts([{"prompt": "What is 1+1?", "label": 2}], chat=True)
try:
    DatasetChatEnv(unlike, tokenizer, rewards=right_number, prompts_per_batch=1)
except ValueError as error:
    print(f"ValueError: {error}\n")

rewards = RewardTransform([right_number, in_a_box], weights=[1.0, 0.2])
env = DatasetChatEnv(prompts, tokenizer, rewards=rewards, prompts_per_batch=16, num_generations=8)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))

# %% [markdown]
# ## Look at samples
#
# Read samples with their scores before you train. `("next", "rewards")` holds each function's score, with NaN for an
# abstention. `("next", "reward")` is their weighted sum, which the advantage compares.


# %%
def show(rows, number):
    """Print the first rows of each of some groups."""
    print(f"{rewards.names[0]:>14} {rewards.names[1]:>9} {'sum':>5}   completion")
    for start in range(0, 8 * number, 8):
        print(f"{rows[start]['query'][-1]['content']}  answer: {rows[start]['answer']}")
        for row in rows[start : start + 3]:
            scores, total = row["next", "rewards"].tolist(), row["next", "reward"].item()
            print(f"{scores[0]:>14.0f} {scores[1]:>9.0f} {total:>5.1f}   {row['completion'][-1]['content']}")


rows = collector.collect()
by_label = sorted(rows.unbind(0), key=lambda row: row["answer"] is not None)  # groups without an answer first
show(by_label, 1)
show(by_label[::-1], 2)

# %% [markdown]
# In a weighted sum an abstention counts 0, so unlabeled rows earn from `in_a_box` only. That is fair:
# all rows of a group have the same label, and a row is compared with its own group only.
# If *all* functions abstain on a row, its reward is NaN: it stays out of every baseline and gets no gradient.
#
# A reward that raises an exception also abstains, on that one sample. The failure is counted, and the run continues.
# So far there are no failures; identical completions of a prompt were scored once, which is counted as well:

# %%
print(dict(rewards.counts))

# %% [markdown]
# ## Train
#
# The loop is that of `first_loop.py`. It records the mean of each reward, where the function did not abstain.

# %%
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
curves = []

for step in range(STEPS):
    rows = collector.collect()
    curves.append(rows["next", "rewards"].nanmean(0).tolist())
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        accumulate(loss_fn, batch, micro_batch_size=64)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    if step % 8 == 0:
        print(f"step {step}: right_number {curves[-1][0]:.2f}, in_a_box {curves[-1][1]:.2f}")

# %%
figure, axes = plt.subplots(figsize=(7, 3.5), facecolor="white", layout="constrained")
window = min(5, STEPS)
for name, curve, weight, color in zip(
    rewards.names, torch.tensor(curves).T, rewards.weights, ("tab:blue", "tab:orange"), strict=True
):
    mean = curve.unfold(0, window, 1).mean(1)
    axes.plot(curve, ".", color=color, alpha=0.4)
    axes.plot(range(window - 1, STEPS), mean, color=color, label=f"{name}, weight {weight:g}")
axes.set(xlabel="step", ylabel="mean score", ylim=(0, 1))
axes.set_title(f"dots: one step; lines: mean of the last {window} steps", fontsize="medium")
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
plt.show()

# %% [markdown]
# Both rewards rise. The box is one decision at the end of an answer, so the model learns it first.
#
# ## The same on the command line
#
# Put both functions into `my_rewards.py`, in the folder where you start the run. One command then does all of this,
# and adds evaluation on held-out prompts, checkpoints and a report:
#
# ```bash
# torchrl-rloo run rloo task=custom data.source=sums.jsonl data.prompt_column=question data.eval_size=32 \
#     data.column_map='{total: answer}' \
#     data.system_prompt='Think, then put the answer in \boxed{}.' \
#     reward.functions='[my_rewards.right_number, my_rewards.in_a_box]' reward.weights='[1, 0.2]' \
#     generate.max_new_tokens=32 plan.steps=40 output_dir=outputs/sums
# ```
#
# ## What to try next
#
# - Change the weights to `[1, 0]`, and see whether the box is still learned.
# - Add a reward of the library, such as `Length` or `SoftOverlong` of `torchrl_rloo.rewards`.
# - Let `right_number` raise an exception on some rows, and read `rewards.counts`.
