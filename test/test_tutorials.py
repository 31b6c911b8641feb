"""The tutorials run and their loops learn, with shorter warm starts, fewer steps and easier rewards."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
README = TUTORIALS.parent / "README.md"


def edited(name: str, **changes: str) -> str:
    """Return a tutorial's source after replacements ``(old, new)``, each of which must match."""
    source = (TUTORIALS / name).read_text()
    for old, new in changes.values():
        assert old in source, old
        source = source.replace(old, new)
    return source


@pytest.fixture
def run(fork_server, warm_model, tmp_path):
    """``run(source, task="addition")``: output of a script, which uses the session's warm start."""

    def run(source: str, task: str = "addition") -> str:
        source, number = re.subn(r"warm_start\(.*?\)", repr(str(warm_model(task))), source)
        assert number > 0
        (tmp_path / "tutorial.py").write_text(source)
        done = fork_server.run(tmp_path / "tutorial.py", cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def rewards_of(stdout: str) -> list[float]:
    return [float(reward) for reward in re.findall(r"reward (-?\d\.\d\d)", stdout)]


BOXES = """

def boxes(completions, **columns):
    return [float("boxed" in messages[0]["content"]) for messages in completions]

"""


def test_the_loop_in_a_page_learns(run):
    """It learns to box the answer, which the model does in two of five completions at first."""
    source = edited(
        "rloo_in_a_page.py",
        steps=("== 25", "== 5"),
        reward=("rewards=boxed_accuracy", "rewards=boxes"),
        definition=("\ntorch.manual_seed(0)", f"{BOXES}torch.manual_seed(0)"),
    )
    rewards = rewards_of(run(source))
    assert len(rewards) == 6
    assert sum(rewards[:2]) / 2 < 0.6 < 0.65 < sum(rewards[-2:]) / 2


def test_the_tool_environment_learns_to_call(run, tmp_path):
    source = edited(
        "tool_environment.py",
        steps=("range(30)", "range(6)"),
        reward=('(f"\\\\boxed{{{a}}}" in t)', '("<tool>" in t)'),
    )
    stdout = run(source, "calculator")
    calls = [float(number) for number in re.findall(r"calls (\d\.\d\d)", stdout)]
    assert len(rewards_of(stdout)) == len(calls) == 6 and (tmp_path / "transcripts.html").is_file()
    assert calls[0] < 0.5 < 0.6 < calls[-1]


def test_ppo_runs(run):
    stdout = run(
        edited(
            "ppo.py",
            steps=("STEPS, PROMPTS, COMPLETIONS, PASSES = 40, 32", "STEPS, PROMPTS, COMPLETIONS, PASSES = 2, 8"),
        )
    )
    assert len(rewards_of(stdout)) == 2
    assert len(re.findall(r"explained variance -?\d", stdout)) == 2


def test_preferences_run(run):
    stdout = run(
        edited(
            "preferences.py",
            steps=("STEPS, PAIRS_PER_STEP = 60, 32", "STEPS, PAIRS_PER_STEP = 2, 32"),
            pairs=("demonstrations(4096", "demonstrations(128"),
            evaluation=("size=256", "size=16"),
        )
    )
    assert "step 1: loss 0.693, preferred the clean answer" in stdout  # log 2: equal to the reference
    assert len(re.findall(r"held-out accuracy: 0\.\d+ before, 0\.\d+ after", stdout)) == 2


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_the_loop_runs_with_vllm(run):
    """It runs with the policy and collector of the README's section on vLLM."""
    pytest.importorskip("vllm")
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (lines,) = [block for block in blocks if "VLLMEngine(" in block]
    before, collector = lines.rstrip().rsplit("\n", 1)
    loop = edited("rloo_in_a_page.py", steps=("== 25", "== 1"))
    loop = re.sub(r"^policy = .*$", lambda _: before, loop, flags=re.MULTILINE)
    loop = re.sub(r"^collector = .*$", lambda _: collector, loop, flags=re.MULTILINE)
    loop = loop.replace("get_new_version(generate", "get_new_version(model=model, generate")
    assert len(rewards_of(run(loop))) == 2
