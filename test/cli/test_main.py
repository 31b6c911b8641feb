"""Command torchrl-rloo: list, run and copy recipes, near matches, and the command line of a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_rloo.cli import main as cli
from torchrl_rloo.cli import recipe
from torchrl_rloo.cli.main import main, recipe_file

LISTED = [name for name in cli.RECIPES]


@pytest.fixture(autouse=True)
def unchanged_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run in an empty folder and restore the process state that starting a recipe changes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    token = recipe.PROGRAM.set(None)
    yield
    recipe.PROGRAM.reset(token)


def outcome(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of a command that does not run the loop of a recipe."""
    try:
        main(argv)
        code = 0
    except SystemExit as error:
        code = error.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_ls_has_a_line_for_every_recipe(capsys):
    code, out, _ = outcome(capsys, "ls")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == LISTED
    assert all(len(line.split()) > 5 for line in out.splitlines())
    files = {str(file.relative_to(recipe.RECIPES)) for file in recipe.RECIPES.glob("*/*.py")}
    assert files == {file for file, *_ in cli.RECIPES.values()}


@pytest.mark.parametrize("command", ["", *cli.COMMANDS])
def test_help_ends_with_examples_that_parse(capsys, command):
    code, out, _ = outcome(capsys, *command.split(), "--help")
    head, examples = out.lower().split("examples:", 1)
    assert code == 0 and "usage: torchrl-rloo" in head and "torchrl-rloo" in examples
    if command not in ("evaluate", "ls", ""):
        code, _, err = outcome(capsys, command)  # without its arguments
        assert code == 1 and len(err.splitlines()) == 1


@pytest.mark.parametrize("name", LISTED)
def test_help_of_a_recipe_names_the_command(capsys, name):
    code, out, _ = outcome(capsys, "run", name, "--help")
    command = "torchrl-rloo evaluate" if name == "evaluate" else f"torchrl-rloo run {name}"
    assert code == 0 and out.startswith(f"usage: {command} ")
    assert recipe_file(name).name not in out and f"  {command} " in out
    assert "output_dir=outputs/" in out


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["rnu"], 1, "unknown command rnu (did you mean 'run'?)"),
        (["run", "rlo"], 1, "unknown recipe rlo (did you mean 'rloo'"),
        (["run", "task=gsm8k"], 1, "unknown recipe task=gsm8k; name a file, or one of simple, rloo, rloo_tools"),
        (["run", "rloo", "model.nam=x"], 1, "unknown setting model.nam: did you mean model.name?"),
        (["run", "rloo", "seed=one"], 1, "seed=one must be an integer"),
        (["evaluate", "eval.num_sample=3"], 1, "unknown setting eval.num_sample: did you mean eval.num_samples?"),
        (["run", "reward_model", "task=gsm8k"], 1, "unknown setting task"),
        (["cp", "rloo", "mine"], 1, "target=mine must be the name of a Python file"),
        (["cp", "rloo", "mine.py", "sed=1"], 1, "unknown setting sed: did you mean seed?"),
        (["serve", "m", "--prot", "8001"], 1, "unrecognized arguments: --prot"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_wrong_command_or_setting_is_one_line(capsys, argv, code, message):
    found, out, err = outcome(capsys, *argv)
    assert found == code and not out and message in err.splitlines()[-1]
    assert len(err.splitlines()) == 1
    assert not list(Path().iterdir())


@pytest.mark.parametrize("name", LISTED)
def test_a_copy_has_the_same_settings_in_a_file(capsys, name):
    assert outcome(capsys, "cp", name, "mine.py")[0] == 0
    stem = recipe_file(name).stem
    text = Path("mine.py").read_text()
    assert f"{stem}.py" not in text and "mine.py" in text
    settings = outcome(capsys, "run", name, "--yaml")[1]
    expected = settings.replace(f"{stem}.py", "mine.py")
    expected = expected.replace(f"outputs/{stem}/", "outputs/mine/").replace(f"outputs/{name}/", "outputs/mine/")
    assert Path("mine.yaml").read_text() == expected
    assert outcome(capsys, "run", "mine.py", "--yaml")[1] == expected  # a written file reads back unchanged
    own = [
        line for line in expected.partition("defaults:")[2].splitlines()[3:] if ": " in line and "override" not in line
    ]
    assert [line for line in own if "#" not in line] == []  # every setting has a comment
    code, _, err = outcome(capsys, "cp", name, "mine.py")
    assert code == 1 and "mine.py exists" in err


def test_the_command_line_overrides_the_file_of_a_copy(capsys):
    assert outcome(capsys, "cp", "rloo", "mine.py", "plan.steps=3", "optimizer.lr=1e-4")[0] == 0

    def values(*overrides: str) -> str:
        return outcome(capsys, "run", "mine.py", *overrides, "--help")[1]

    Path("mine.yaml").write_text(Path("mine.yaml").read_text().replace("temperature: 1.0", "temperature: 0.7"))
    assert "plan.steps=3 " in values() and "optimizer.lr=0.0001 " in values()
    assert "generate.temperature=0.7" in values() and "generate.temperature=0.5" in values("generate.temperature=0.5")
    assert "generate.max_new_tokens=512 " in values("task=gsm8k")  # set by the task, because the file leaves it out
    assert "plan.steps=3 " in values("task=guessing")  # given to cp, so set by the file
    text = Path("mine.yaml").read_text().replace("# max_new_tokens: 32", "max_new_tokens: 9")
    Path("mine.yaml").write_text(text)
    assert "generate.max_new_tokens=9 " in values("task=gsm8k")
    Path("mine.yaml").write_text(text.replace("temperature: ", "temprature: "))
    code, _, err = outcome(capsys, "run", "mine.py")
    assert code == 1 and "temprature" in err and len(err.splitlines()) == 1


def test_serve_becomes_the_servers_process(capsys, monkeypatch):
    pytest.importorskip("vllm")
    started = []
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    main(
        ["serve", "my/model", "--port", "8001", "--dtype", "bfloat16", "--threads", "2", "--", "--max-model-len", "64"]
    )
    (file, command, environment) = started[0]
    assert file == command[0] == sys.executable and command[-2:] == ["--max-model-len", "64"]
    for flag, value in (("--model", "my/model"), ("--port", "8001"), ("--dtype", "bfloat16")):
        assert command[command.index(flag) + 1] == value
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["OMP_NUM_THREADS"] == "2"
    assert "inference.engine.url=http://127.0.0.1:8001" in capsys.readouterr().out


def test_serve_takes_the_settings_of_a_run():
    given = ["inference=vllm_server", "inference.engine.url=http://10.0.0.7:8011", "model.name=my/model"]
    expected = {"model": "my/model", "dtype": "float32", "host": "10.0.0.7", "port": 8011}
    assert cli.served_settings("rloo", given) == expected
    lora = ["lora={r:2}", "model.dtype=bfloat16", "data.max_prompt_length=100", "generate.max_new_tokens=28"]
    assert cli.served_settings("rloo", [*given, *lora]) == expected | {"dtype": "bfloat16", "max_model_len": 128}
    tools = ["data.max_prompt_length=100", "environment.max_tokens=90"]
    assert cli.served_settings("rloo_tools", [*given[:2], *tools])["max_model_len"] == 90


def test_serve_starts_with_the_model_of_the_run(capsys, monkeypatch):
    monkeypatch.setattr("torchrl_rloo.embedded.resolve_model", lambda name, seed, task, log: f"{name}-{seed}-{task}")
    assert cli.served_settings("rloo", ["seed=3"])["model"] == "embedded-3-addition"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    code, _, err = outcome(capsys, "serve", "sft")
    assert code == 1 and err.startswith("error: sft.py has no algorithm") and err.count("\n") == 1


def test_serve_names_the_extra_without_vllm(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = outcome(capsys, "serve", "my/model")
    assert code == 1 and "pip install 'torchrl_rloo[vllm]'" in err


def test_help_and_a_wrong_setting_import_nothing_heavy():
    source = """
import sys
from torchrl_rloo.cli.main import main
for argv in (["--help"], ["ls"], ["run", "rloo", "--help"], ["run", "rloo", "plan.stps=1"], ["cp", "rloo", "mine.py"]):
    try:
        main(argv)
    except SystemExit:
        pass
    heavy = {"torch", "torchrl", "tensordict", "transformers", "datasets", "numpy", "vllm"} & set(sys.modules)
    assert not heavy, (argv, heavy)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_help_into_a_pipe_that_closes_early_is_silent():
    """As in ``torchrl-rloo run rloo --help | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torchrl_rloo.cli.main", "run", "rloo", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr[-800:]) == (0, "")
