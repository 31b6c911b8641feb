# %% [markdown]
# # A game of several turns
#
# You write a small game with `reset` and `step`, and train the built-in model to play it.
# Each turn earns its own reward, and you compare turns instead of whole games.
# At the end you know how a conversation ends, where rewards of turns are stored, and what `credit="turn"` changes.

# %%
import random
import re
import tempfile
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import stop_reason, tensor_rows
from torchrl_rloo.diagnostics import write_transcripts
from torchrl_rloo.embedded import warm_start
from torchrl_rloo.envs.text import text_env
from torchrl_rloo.envs.transforms import TurnRewardTransform
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)  # for the buffer's shuffling; the environment and the policy have their own seeds
STEPS = 18

# %% [markdown]
# ## The game
#
# The game hides a number. Every guess is answered with "higher" or "lower", and four guesses are allowed.
# The interface is Gymnasium's, with text as observation and action:
#
# - `reset(seed=...)` returns the opening and a dictionary. All games of a group get the same seed, and must open alike.
# - `step(text)` returns the answer, the reward of this turn, `terminated`, `truncated` and a dictionary for the log.
#
# The right number earns 1. A guess that earlier answers rule out is wasted, and costs 0.2.


# %%
class Hunt:
    """Find a number between two bounds."""

    max_guesses = 4

    def reset(self, *, seed=None):
        rng = random.Random(seed)
        size = rng.randint(24, 39)
        self.low = rng.randint(10, 98 - size)
        self.high = self.low + size + 1
        self.secret = rng.randint(self.low + 1, self.high - 1)
        self.guesses = 0
        return f"Guess a number between {self.low} and {self.high}.", {}

    def step(self, text):
        self.guesses += 1
        numbers = re.findall(r"\d+", text.split("</think>")[-1])
        guess = int(numbers[-1]) if numbers else 0
        if guess == self.secret:
            return "found", 1.0, True, False, {"found": True}
        wasted = not self.low < guess < self.high
        answer = "higher" if guess < self.secret else "lower"
        if not wasted:
            self.low, self.high = (guess, self.high) if answer == "higher" else (self.low, guess)
        return answer, -0.2 * wasted, False, self.guesses == self.max_guesses, {"found": False}


game = Hunt()
print(game.reset(seed=1)[0])
for text in ("50", "20", "90"):
    print(text, "->", game.step(text))

# %% [markdown]
# ## The environment
#
# `text_env` gives every conversation its own game. It is short for a `TextEnvTransform` in a `DatasetChatEnv`, whose
# rows hold nothing but seeds. It takes a class, a factory or an instance, and other styles than Gymnasium's.
#
# The return of a game is the sum of its rewards. `TurnRewardTransform` also keeps them apart, turn by turn.

# %%
model, tokenizer = load_model(warm_start(seed=0, task="guessing"))
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 12, "seed": 0})
env = text_env(Hunt, tokenizer, prompts_per_batch=16, num_generations=8, after_rewards=[TurnRewardTransform()])
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
rows = collector.collect()

# %% [markdown]
# The built-in player sometimes writes down the bounds that are left, and then guesses well. Often it writes nothing.
# The reward of a turn stands at the turn's last token:


# %%
def turns_of(row, values):
    """Return the value at the last token of each turn of the policy."""
    mine = row["masks", "all_assistant_mask"]
    last = mine & ~torch.cat([mine[1:], mine.new_zeros(1)])
    return values.flatten()[last].tolist()


def show(row):
    """Print a conversation with the reward of each turn."""
    rewards = iter(turns_of(row, row["next", "token_rewards", "full"]))
    for message in [*row["query"], *row["completion"]]:
        earned = f"  [{next(rewards):+.1f}]" if message["role"] == "assistant" else ""
        print(f"{message['role']:>10}: {message['content']}{earned}")
    print(f"    return: {row['next', 'reward'].item():+.1f}, ended as {stop_reason(row)!r}\n")


played = sorted(rows[:16].unbind(0), key=lambda row: row["next", "reward"].item())
show(played[0])
show(played[-1])

# %% [markdown]
# ## Why conversations end
#
# Every row has one stop reason. `ended` means that the game terminated, and `turns` that its own limit ended it.
# `turn_tokens` is a turn cut off by `max_new_tokens`; the game never sees such a turn.

# %%
print(Counter(stop_reason(row) for row in rows.unbind(0)))
page = write_transcripts(Path(tempfile.mkdtemp()) / "transcripts.html", rows, tokenizer)
print("all of them, to open in a browser:", page)

# %% [markdown]
# ## Credit: trajectory or turn
#
# By default all turns of a game share one advantage, from the game's return. Good turns pay for a bad one before them.
#
# `credit="turn"` gives each turn its own. It adds up the rewards from that turn on, and compares the sum with the same
# turn of the group's other games. What was earned before a turn is not the turn's merit, and no longer adds noise.
#
# The picture shows a game that begins with a wasted guess, and continues without another.

# %%
advantages = {}
for credit in ("trajectory", "turn"):
    buffer = ReplayBuffer(storage=RowStorage(), transform=MCAdvantage(credit=credit))
    buffer.extend(tensor_rows(rows))
    advantages[credit] = [row["advantage"].expand(len(row["tokens", "full"]), 1) for row in buffer[:].unbind(0)]

each = [turns_of(row, row["next", "token_rewards", "full"]) for row in rows.unbind(0)]
by_turn = [turns_of(row, values) for row, values in zip(rows.unbind(0), advantages["turn"], strict=True)]


def recovery(i):
    """Return how much better the later turns of a game did than its wasted first; -1 for other games."""
    return sum(by_turn[i][1:]) - by_turn[i][0] if each[i][0] < 0 <= min(each[i][1:], default=-1) else -1


chosen = max(range(len(rows)), key=recovery)
show(rows[chosen])

figure, axes = plt.subplots(figsize=(7, 3.2), facecolor="white", layout="constrained")
bars = {"reward of the turn": each[chosen]}
bars |= {f'advantage, credit="{c}"': turns_of(rows[chosen], a[chosen]) for c, a in advantages.items()}
for place, ((label, values), color) in enumerate(
    zip(bars.items(), ("lightgray", "tab:orange", "tab:blue"), strict=True)
):
    axes.bar([turn + 0.27 * (place - 1) for turn in range(1, len(values) + 1)], values, 0.25, label=label, color=color)
axes.axhline(0, color="black", linewidth=0.8)
axes.set(xlabel="turn", xticks=range(1, len(each[chosen]) + 1), ylabel="value")
figure.legend(loc="outside upper center", ncols=3, fontsize="small")
plt.show()

# %% [markdown]
# One advantage for the game treats all turns alike, the wasted one as well. The credit by turn tells them apart.
#
# ## Train
#
# With one advantage for each token, the loss needs a ratio for each token: `ratio="token"`.

# %%
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(credit="turn"), batch_size=128
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False), ratio="token")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0)
wasted, returns = [], []

for step in range(STEPS):
    rows = collector.collect() if step else rows
    each = [turns_of(row, row["next", "token_rewards", "full"]) for row in rows.unbind(0)]
    wasted.append(sum(reward < 0 for rewards in each for reward in rewards) / len(rows))
    returns.append(rows["next", "reward"].mean().item())
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        accumulate(loss_fn, batch, micro_batch_size=64)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    if step % 4 == 0:
        print(f"step {step}: reward {returns[-1]:.2f}, wasted guesses {wasted[-1]:.2f}")

# %%
figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), facecolor="white", layout="constrained")
for axes, values, label in zip(panels, (wasted, returns), ("wasted guesses for each game", "mean return"), strict=True):
    axes.plot(values, ".-", color="tab:blue")
    axes.set(xlabel="step", ylabel=label)
    axes.grid(alpha=0.3)
panels[0].set_ylim(0, None)
plt.show()

played = sorted(rows[:16].unbind(0), key=lambda row: row["num_turns"].item())
show(played[-1])

# %% [markdown]
# Wasted guesses become rarer: each one lowers the advantage of its turn and of those before it, never of later ones.
# Returns rise with more noise, because a win also needs luck: four guesses do not always suffice.
#
# ## What to try next
#
# - Train with `MCAdvantage(credit="trajectory")`, and compare the two curves over a few seeds.
# - Pass a function to `TurnRewardTransform`, for example one that rewards short turns.
# - Give the game bounds of your own rows: pass `dataset=load_prompts(...)`, and take the columns in `reset`.
