"""MLGymWrapper: commands, scores, ends and closing, over an environment with MLGym's interface and a real shell."""

from __future__ import annotations

import subprocess
import tempfile

import pytest
import torch

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys
from torchrl_rloo.data.stop_reasons import stop_reason
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs.text import MLGymWrapper, text_env
from torchrl_rloo.envs.text.adapters import read_scores
from torchrl_rloo.modules import vLLMWrapper


class Shell:
    """MLGym's interface: no first observation, four values of a step, and a reward of 0."""

    made: list[Shell]

    def __init__(self, folder):
        self.folder, self.commands, self.closed = tempfile.mkdtemp(dir=folder), [], 0
        self.made.append(self)

    def reset(self, *, seed=None, options=None):
        return {"observation": None}, {}

    def communicate(self, command):
        return subprocess.run(
            ["sh", "-c", command], cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        ).stdout

    def step(self, action):
        self.commands.append(action)
        if action in ("validate", "submit"):
            score = float(self.communicate("cat score") or 0)
            said = "Your code produced a valid submission artefact at score.\nBaseline Score: {'Score': 0.25}\n"
            return f"{said}Evaluation Score: {{'Score': {score}}}", 0, action == "submit", {"exit_status": action}
        return self.communicate(action), 0, False, {}

    def close(self):
        self.closed += 1


def play(tokenizer, tmp_path, turns, **settings):
    """Return rows, environments and what the policy was shown, of conversations with these turns."""
    Shell.made = []
    shown: dict[str, str] = {}

    def script(request, index):
        text = tokenizer.decode(request.prompt)
        told = sum(turn in text for turn in turns)
        shown[turns[told]] = text
        return ScriptedTurn([*tokenizer.encode(turns[told], add_special_tokens=False), tokenizer.eos_token_id])

    env = text_env(
        lambda: MLGymWrapper(lambda: Shell(tmp_path), task="Improve.", **settings),
        tokenizer,
        prompts_per_batch=1,
        num_generations=2,
        max_turns=8,
    )
    with ScriptedEngine(script) as engine:
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 100, "seed": 0})
        rows = LLMCollector(env, policy).collect()
    env.close()
    return rows, Shell.made, shown


def test_a_task_pays_the_change_of_its_score(bpe, tmp_path):
    turns = [
        "I look.\n```\necho 0.75 > score\n```\nThen:\n```bash\ncat score\n```",
        "No command here.",
        "```\necho 0.5 > score\n```",
        "```\nvalidate\n```",
        "Once more: ```\nvalidate\n```",
        "```\necho 0.75 > score; true\n```",
        "Done. ```\nsubmit\n```",
    ]
    rows, made, shown = play(bpe, tmp_path, turns, state=lambda env: f"(files: {env.communicate('ls').strip()})")
    for row in rows.unbind(0):
        assert float(row[keys.REWARD]) == pytest.approx(0.5)  # 0.75 - 0.25, although it was evaluated three times
        assert stop_reason(row) == "ended" and int(row[keys.NUM_TURNS]) == 7
        assert row["next", "log_extra"]["score"] == 0.75 and row["next", "log_extra"]["exit_status"] == "submit"
    assert [env.closed for env in made] == [1, 1]
    assert made[0].commands == [
        "cat score",  # the last block
        "echo 0.5 > score",
        "validate",
        "validate",
        "echo 0.75 > score; true",
        "submit",
    ]
    assert "Improve." in shown[turns[0]] and "(no output)\n(files: )" in shown[turns[1]].replace("\n\n", "\n")
    assert "Write exactly one command" in shown[turns[2]] and "(files: score)" in shown[turns[3]]


def test_smaller_scores_may_be_better_and_formats_cost(bpe, tmp_path):
    turns = ["What?", "```\necho 0.125 > score\n```", "```\nsubmit\n```"]
    rows, _, _ = play(bpe, tmp_path, turns, lower_is_better=True, format_reward=-0.5)
    assert torch.allclose(rows[keys.REWARD].flatten(), torch.tensor([0.125 - 0.5] * 2))


def test_scores_are_read_from_any_metric():
    assert read_scores("Baseline Score: {'MSE': 1e-3}\nEvaluation Score: {'MSE': -2.5, 'R2': 3}") == (-2.5, 1e-3)
    assert read_scores("Evaluation Score: {'Score': 1}") is None and read_scores("") is None
