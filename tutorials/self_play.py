# %% [markdown]
# # A game learned by self-play
#
# Two players with the same weights play against each other, without an example of how to win.
# At the end you know how an agent gives roles to its calls, and what each role is compared with.

# %%
import json
import random
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from torchrl_rloo.agents import agent_env
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import encode_demonstrations, load_prompts, tensor_rows
from torchrl_rloo.diagnostics import completion_metrics
from torchrl_rloo.embedded import warm_start
from torchrl_rloo.modules import TransformersWrapper, load_model
from torchrl_rloo.objectives import RLOOLoss, SFTLoss
from torchrl_rloo.replay import MCAdvantage, RowStorage
from torchrl_rloo.training import accumulate, optimizer_step
from torchrl_rloo.weight_update import InProcessWeightUpdater

torch.manual_seed(0)  # for shuffling and demonstrations; the environment and the policy have their own seeds
rng = random.Random(0)
STEPS = 16
LESSONS = 80

# %% [markdown]
# ## The game
#
# Some stones lie on a table. Players take one or two of them in turn, and who takes the last stone wins.
# A player who leaves a multiple of three wins, so the right move from `n` stones is `n % 3`.
# Nothing below tells the model so.
#
# The agent is a function that plays one game. `context.openai("first")` is the client of a role: its calls make the
# rows of that role, and never those of the other. The rewards at the end are for each role apart.


# %%
async def move(client, stones):
    """Ask for a move, and return it; 0 if it breaks the rules."""
    messages = [{"role": "user", "content": f"{stones} stones"}]
    reply = await client.chat.completions.create(model="policy", messages=messages)
    said = reply.choices[0].message.content or ""
    return int(said) if said in ("1", "2") and int(said) <= stones else 0


async def play(context, row):
    """Play one game, and return the rewards of both players."""
    stones, turn, right, chances = row["stones"], 0, 0, 0
    async with context.openai("first") as first, context.openai("second") as second:
        while True:
            taken = await move((first, second)[turn], stones)
            chances += stones % 3 > 0
            right += 0 < taken == stones % 3
            stones -= taken
            if taken == 0 or stones == 0:
                break
            turn = 1 - turn
    winner = turn if taken else 1 - turn
    rewards = {"first": 1.0 - 2 * winner, "second": 2.0 * winner - 1}
    return {"rewards": rewards, "metrics": {"right": right, "chances": chances}}


# %% [markdown]
# ## The first player
#
# The built-in model has never seen the game. A short lesson of random moves teaches it the rules, and nothing more.

# %%
model, tokenizer = load_model(warm_start(seed=0))
lesson = SFTLoss(TransformersWrapper(model, tokenizer=tokenizer, generate=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
for _ in range(LESSONS):
    shown = []
    for _ in range(32):
        stones = rng.randint(1, 7)
        moves = str(rng.randint(1, min(2, stones)))
        shown.append([{"role": "user", "content": f"{stones} stones"}, {"role": "assistant", "content": moves}])
    accumulate(lesson, encode_demonstrations(shown, tokenizer))
    optimizer_step(model, optimizer, max_grad_norm=1.0)

# %% [markdown]
# ## Rows of roles
#
# `roles=` turns each conversation into one row for each role. A group has the games that begin with as many stones.
# Within it, the first player's return is compared with those of other first players, and the second's with those of
# other second players. Who begins with seven stones should win, and who begins with six should not.

# %%
policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4, "seed": 0})
games = load_prompts([{"query": [{"role": "user", "content": f"{n} stones"}], "stones": n} for n in range(2, 8)])
env = agent_env(
    play, tokenizer, dataset=games, prompts_per_batch=6, num_generations=16, roles=["first", "second"], max_turns=None
)
collector = LLMCollector(env, policy, weight_updater=InProcessWeightUpdater(model, policy.model))
rows = collector.collect()
for row in rows[:32:16].unbind(0):
    print(row["role"], "of", row["stones"], "stones, group", row["group_id"].item(), end=": ")
    print("return", row["next", "reward"].item(), "after", row["num_turns"].item(), "moves")

# %% [markdown]
# A player that never came to move has a row without tokens. It abstains, so its group is complete all the same.
#
# ## Train
#
# Each move is a separate sample, since the model sees only the stones. `accumulate` splits a row into its samples.

# %%
buffer = ReplayBuffer(
    storage=RowStorage(), sampler=SamplerWithoutReplacement(), transform=MCAdvantage(), batch_size=128
)
loss_fn = RLOOLoss(policy.get_new_version(generate=False), entropy_coeff=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
history = []

for step in range(STEPS):
    rows = collector.collect() if step else rows
    logged = [row["next", "log_extra"] for row in rows.unbind(0)]
    right = sum(game.get("right", 0) for game in logged) / sum(game.get("chances", 0) for game in logged)
    metrics = completion_metrics(rows, [], [])
    history.append({"step": step, "right_moves": right, "first_player": metrics["roles/first/reward"]})
    buffer.extend(tensor_rows(rows))
    for batch in buffer:
        accumulate(loss_fn, batch)
        optimizer_step(model, optimizer, max_grad_norm=1.0)
    buffer.empty()
    collector.update_policy_weights_()
    if step % 4 == 0 or step == STEPS - 1:
        print(f"step {step}: right moves {right:.2f}, return of the first player {history[-1]['first_player']:+.2f}")
collector.shutdown()

run = Path(tempfile.mkdtemp()) / "self-play"
run.mkdir(exist_ok=True)
(run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
print("curves:", run / "metrics.jsonl")

# %% [markdown]
# ## What was learned
#
# The last panel asks the model for its chance to take two stones.

# %%
questions = [[{"role": "user", "content": f"{n} stones"}] for n in range(2, 8)]
inputs = tokenizer.apply_chat_template(questions, add_generation_prompt=True, return_tensors="pt", return_dict=True)
with torch.no_grad():
    chances = model(**inputs).logits[:, -1].softmax(-1)
takes_two = chances[:, tokenizer.convert_tokens_to_ids("2")].tolist()

figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), facecolor="white", layout="constrained")
for axes, name in zip(panels, ("right_moves", "first_player"), strict=False):
    axes.plot([row[name] for row in history], ".-", color="tab:blue")
    axes.set(xlabel="step", ylabel=name.replace("_", " "))
    axes.grid(alpha=0.3)
panels[0].set_ylim(0, 1.02)
colors = ["tab:green" if n % 3 == 2 else "tab:gray" if n % 3 == 0 else "tab:red" for n in range(2, 8)]
panels[2].bar(range(2, 8), takes_two, color=colors)
panels[2].set(xlabel="stones (green: two wins, red: one wins)", ylabel="probability of taking two")
plt.show()

# %% [markdown]
# The share of right moves rises from 0.65, that of random moves, to 1. Four of the six openings are won by the player
# who begins, so its return rises to one third: this is what two perfect players get.
#
# The entropy bonus keeps both moves in play until the model knows the end of the game, on which longer games depend.
#
# ## What to try next
#
# - Freeze one player: `roles=["first", Role("second", frozen=True)]`. Its calls then make no rows.
# - Play one game for each opening with `num_generations=1`, and `MCAdvantage(1, estimator=RunningBaseline(by="role"))`.
# - Let one role propose the number of stones and pay it for close games.
