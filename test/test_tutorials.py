"""The README's loop and other programs learn; ``.ci/environments.py`` runs the tutorials of the documentation."""

from __future__ import annotations

import re

import pytest

from support.tutorials import NOTEBOOKS, TUTORIALS, replaced

README = TUTORIALS.parent / "README.md"


def edited(name: str, **changes: tuple[str, str]) -> str:
    """Return a tutorial's source after replacements."""
    return replaced((TUTORIALS / name).read_text(), *changes.values())


@pytest.fixture
def run(fork_server, warm_model, tmp_path):
    """``run(source, task="addition")``: output of a script, which uses the session's warm start and shows no figure."""

    def run(source: str, task: str = "addition") -> str:
        source, number = re.subn(r"warm_start\(.*?\)", repr(str(warm_model(task))), source)
        assert number > 0
        source = source.replace("tempfile.mkdtemp()", repr(str(tmp_path)))
        source = f'import matplotlib\n\nmatplotlib.use("Agg")\n{source}'
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


def read_loop() -> str:
    """Return the loop of the README."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    return block


def test_the_loop_of_the_readme_learns(run):
    """It learns to box the answer, which the model does in two of five completions at first."""
    source = replaced(
        read_loop(),
        ("range(25)", "range(6)"),
        ("rewards=boxed_accuracy", "rewards=boxes"),
        ("\ntorch.manual_seed(0)", f"{BOXES}torch.manual_seed(0)"),
    )
    rewards = rewards_of(run(source))
    assert len(rewards) == 6
    assert sum(rewards[:2]) / 2 < 0.6 < 0.65 < sum(rewards[-2:]) / 2


def test_the_loop_with_images_learns(run):
    page = TUTORIALS.parent / "docs" / "how-to" / "images.md"
    source = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    rewards = rewards_of(run(replaced(source, ("range(20)", "range(6)")), "shapes"))
    assert len(rewards) == 6 and sum(rewards[:2]) + 0.1 < sum(rewards[-2:])


def test_the_tool_environment_learns_to_call(run, tmp_path):
    source = edited(
        "tool_environment.py",
        steps=("STEPS = 26", "STEPS = 6"),
        reward=('(f"\\\\boxed{{{a}}}" in t)', '("<tool>" in t)'),
        log=("step % 5 == 0", "True"),
    )
    stdout = run(source, "calculator")
    calls = [float(number) for number in re.findall(r"calls (\d\.\d\d)", stdout)]
    assert len(rewards_of(stdout)) == len(calls) == 6 and (tmp_path / "transcripts.html").is_file()
    assert calls[0] < 0.5 < 0.6 < calls[-1]


def test_the_search_finds_settings(fork_server, warm_model, tmp_path):
    pytest.importorskip("optuna")
    page = TUTORIALS.parent / "docs" / "how-to" / "search.md"
    (source,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    tiny = f'"plan.steps=1", "plan.prompts_per_step=2", "data.eval_size=4", "model.name={warm_model()}"'
    (tmp_path / "search.py").write_text(replaced(source, ('"plan.steps=5"', tiny), ("n_trials=4", "n_trials=1")))
    done = fork_server.run(tmp_path / "search.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"\{'lr': [\d.e-]+, 'generations': [48]\} [\d.]+$", done.stdout.strip())


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_notebook_has_cells(name):
    """In jupytext's percent format: a title first, cells of text that are comments, cells of code that compile."""
    source = (TUTORIALS / name).read_text()
    assert source.startswith("# %% [markdown]\n# # ")
    kinds = []
    for kind, cell in re.findall(r"^# %%(.*)\n(.*(?:\n(?!# %%).*)*)", source, re.MULTILINE):
        kinds.append(kind)
        if kind:
            assert kind == " [markdown]"
            assert all(line.startswith("#") for line in cell.split("\n") if line), cell
        else:
            compile(cell, name, "exec")
    assert kinds.count("") >= 5 and kinds[-1] == " [markdown]" and "\n# ## What to try next\n" in source


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_minimal_async_keeps_its_bound(run):
    pytest.importorskip("vllm")
    stdout = run(edited("minimal_async.py", steps=("type=int, default=60", "type=int, default=4")))
    oldest = re.findall(r"staleness \d\.\d\d \(at most (\d)\)", stdout)
    assert oldest == ["0", "1", "1", "1"]  # the first batch has no earlier version; the others were sampled ahead
    assert len(rewards_of(stdout)) == 4 and "which the loss left out: 0\n" in stdout


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
def test_the_loop_runs_with_vllm(run):
    """The lines of ``docs/how-to/vllm.md`` replace the policy and the collector of the README's loop."""
    pytest.importorskip("vllm")
    page = TUTORIALS.parent / "docs" / "how-to" / "vllm.md"
    lines = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[0]
    before, collector = lines.rstrip().rsplit("\n", 1)
    loop = replaced(read_loop(), ("range(25)", "range(2)"))
    loop = re.sub(r"^policy = .*$", lambda _: before, loop, flags=re.MULTILINE)
    loop = re.sub(r"^collector = .*$", lambda _: collector, loop, flags=re.MULTILINE)
    loop = loop.replace("get_new_version(generate", "get_new_version(model=model, generate")
    assert len(rewards_of(run(loop))) == 2
