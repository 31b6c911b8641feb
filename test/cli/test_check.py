"""Command torchrl-rloo check: planted mistakes, each named before a step is trained, and runs without any."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.recipes import run_recipe_here
from torchrl_rloo.cli import recipe
from torchrl_rloo.cli.check import CheckError
from torchrl_rloo.cli.main import main
from torchrl_rloo.embedded import addition_prompts, warm_start

OWN_REWARDS = """
def age(answer, **columns):
    return [float(len(text)) for text in answer]


def first_letter(completions, answer, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [0.5 * (text[0] == "<") + (right in text.split()[-1]) for text, right in zip(texts, answer)]


def mentions(completions, answer, **columns):
    return [float(right in each[-1]["content"]) for each, right in zip(completions, answer)]


def brief(completions, **columns):
    return [1.0 / (1.0 + len(each[-1]["content"])) for each in completions]


def few_steps(facts):
    from torchrl_rloo.diagnostics.checks import Finding

    return Finding("warn", f"{facts.plan.steps} steps are few", "raise plan.steps")
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Working directory with a user's module, and unchanged arguments of the process afterwards."""
    (tmp_path / "own_checked.py").write_text(OWN_REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("own_checked", None)
    token = recipe.PROGRAM.set(None)
    yield tmp_path
    recipe.PROGRAM.reset(token)


@pytest.fixture(scope="session")
def start_model() -> Callable[[str], Path]:
    """Function ``start_model(task="addition")``: folder of a model that solves about a quarter of a task's prompts."""
    steps = {"addition": 220, "calculator": 120}
    return lambda task="addition": warm_start(task=task, steps=steps[task], clean=True)


@pytest.fixture
def check(capsys, start_model) -> Callable[..., tuple[int, list[str]]]:
    """Function ``check(*settings, rows=...)``: exit code and lines of the command on addition prompts from a file."""

    def check(*settings: str, rows: Sequence[dict[str, Any]] = (), name: str = "rloo") -> tuple[int, list[str]]:
        lines = [json.dumps(row) for row in rows or addition_prompts("train", size=200)]
        Path("train.jsonl").write_text("\n".join(lines))
        given = {setting.partition("=")[0] for setting in settings}
        base = {"data.source": "train.jsonl", "model.name": start_model(), "plan.prompts_per_step": 8}
        base |= {"data.eval_size": 60, "output_dir": "out"}
        arguments = [f"{key}={value}" for key, value in base.items() if key not in given]
        with pytest.raises(SystemExit) as ended:
            main(["check", name, *arguments, *settings])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err and not Path("out").exists()  # it writes nothing
        return ended.value.code, [line for line in (captured.out + captured.err).splitlines() if line]

    return check


def find(lines: list[str], level: str) -> list[str]:
    return [line for line in lines if line.startswith(f"{level} ")]


def test_a_healthy_run_passes(check):
    code, lines = check()
    assert code == 0 and not find(lines, "warn") + find(lines, "error") and len(find(lines, "ok")) >= 15
    assert any(line.endswith("checks passed, 0 warnings, 0 errors") for line in lines)
    assert any(line.startswith("a completion of the start model (") for line in lines)


@pytest.mark.parametrize(("name", "task"), [("rloo", "addition"), ("rloo_tools", "calculator")])
def test_defaults_of_built_in_tasks_pass(check, start_model, name, task):
    model, default = f"model.name={start_model(task)}", ("data.source=embedded", "data.eval_size=256")
    code, lines = check(f"task={task}", model, *default, "plan.prompts_per_step=16", name=name)
    assert code == 0 and not find(lines, "warn") + find(lines, "error")


def test_the_asynchronous_recipe_corrects_stale_rows(check):
    code, lines = check("algorithm=rloo", "inference=ray_transformers")
    (staleness,) = [line for line in lines if " staleness: " in line]
    assert code == 0 and "2 weight updates old; loss.ratio=none and loss.correction=tis corrects" in staleness
    code, lines = check("algorithm=rloo", "loss.correction=null", "inference=ray_transformers")
    assert code == 1 and "staleness: rows may be 2 weight updates old, and loss.ratio=none" in find(lines, "error")[0]


def duplicated(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Repeat each row in capitals and with spaces, under another number."""
    copies = []
    for number, row in enumerate(rows * 2):
        system, user = row["query"]
        content = user["content"].upper() if number >= len(rows) else f"{user['content']} "
        copies.append({"query": [system, {**user, "content": content}], "answer": row["answer"], "number": number})
    return copies


ROWS = addition_prompts("train", size=200)
SYSTEM = ROWS[0]["query"][0]
HARD = [
    {
        "query": [SYSTEM, {"role": "user", "content": f"What is {a}*{a + 7}*{a + 9}?"}],
        "answer": str(a * (a + 7) * (a + 9)),
    }
    for a in range(100, 300)
]
OWN = "task=custom reward.functions=[own_checked.{}]"

MISTAKES = {  # settings, rows, level, check, part of its sentence
    "a reward ignores the completion": (
        OWN.format("age"),
        ROWS,
        "error",
        "reward order: reward age gives all completions of a prompt the same",
    ),
    "a reward raises on an empty completion": (
        OWN.format("first_letter"),
        ROWS,
        "warn",
        "reward failures: reward first_letter fails on empty",
    ),
    "a reward accepts a list of guesses": (
        OWN.format("mentions"),
        ROWS,
        "warn",
        "reward order: a hostile completion (a list of many answers) earns 1, as much as the right answer",
    ),
    "a reward prefers to say nothing": (
        OWN.format("brief"),
        ROWS,
        "error",
        "reward order: an empty completion earns 1, as much as the right answer",
    ),
    "the column of answers is empty": (
        "",
        [row | {"answer": "" if i % 4 else row["answer"]} for i, row in enumerate(ROWS)],
        "error",
        "answers: column 'answer', which the rewards read, is empty in",
    ),
    "all prompts are too hard": (
        "",
        HARD,
        "error",
        "signal: all 64 completions of 8 prompts by the start model earn 0 (the pass rate is likely below 4.7%",
    ),
    "groups are too small": (
        "plan.num_generations=2",
        ROWS,
        "warn",
        "sizes: 8 prompts x 2 completions in a step, 16 rows in an optimizer step: the baseline of a completion is",
    ),
    "prompts are repeated": (
        "",
        duplicated(ROWS),
        "warn",
        "of 340 training rows repeat another, up to case and spaces",
    ),
    "held-out prompts are trained on": (
        "data.eval_source=eval.jsonl data.eval_size=256",
        ROWS,
        "error",
        "overlap: 120 of 180 held-out prompts are also trained on, 0 word for word",
    ),
    "the limit of tokens is too low": (
        "generate.max_new_tokens=8",
        ROWS,
        "error",
        "truncation: a limit cuts off 9",
    ),
    "the chat template drops the prompt": (
        "model.chat_template=dropping.jinja",
        ROWS,
        "error",
        "template: 32 different prompts have only 1 different encodings, so the policy cannot see them",
    ),
    "stale rows have no correction": (
        "algorithm=rloo collector.max_staleness=3 sampler.share_weights=false",
        ROWS,
        "error",
        "staleness: rows may be 3 weight updates old, and loss.ratio=none takes them for on-policy",
    ),
    "the disk is too small": (
        "checkpoint.keep=1000000000",
        ROWS,
        "error",
        "disk: 1000000001 checkpoints of about 0.00 GB need 1,8",
    ),
    "another token ends turns": (
        "model.name=other_end",
        ROWS,
        "error",
        "stop ids: the chat template ends a turn with '<|im_end|>', but sampling stops only at '<|endoftext|>'",
    ),
    "nothing is evaluated": (
        "eval.every=0",
        ROWS,
        "warn",
        "evaluation: 60 held-out prompts, evaluated only at the end",
    ),
}


@pytest.mark.parametrize(("settings", "rows", "level", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_planted_mistake_is_named(check, start_model, settings, rows, level, words):
    # Files that some of the settings name
    held_out = addition_prompts("test", size=60)
    leaked = [
        {
            **row,
            "query": [row["query"][0], {"role": "user", "content": f"what  is {row['query'][1]['content'][8:-1]} ?"}],
        }
        for row in ROWS[:120]
    ]
    Path("eval.jsonl").write_text("\n".join(map(json.dumps, [*held_out, *leaked])))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    Path("dropping.jinja").write_text(template)
    if "other_end" in settings:
        shutil.copytree(start_model(), "other_end")
        for file in Path("other_end").glob("*config.json"):
            text = json.loads(file.read_text())
            text |= {"eos_token_id": 0} if "eos_token_id" in text else {}
            text |= {"eos_token": "<|endoftext|>"} if "eos_token" in text else {}
            file.write_text(json.dumps(text))
    code, lines = check(*settings.split(), rows=rows)
    assert any(words in line for line in find(lines, level)), lines
    assert code == (level == "error") or find(lines, "error")
    assert all("; " in line for line in find(lines, level))  # each has a remedy


def test_a_run_stops_before_its_first_step(start_model, capsys):
    settings = [f"model.name={start_model()}", "plan.prompts_per_step=4", "generate.max_new_tokens=4", "output_dir=out"]
    with pytest.raises(CheckError, match="check.mode=stop refuses signal: all 32 completions"):
        run_recipe_here("rloo", *settings, "check.mode=stop")
    printed = capsys.readouterr().out
    assert "error truncation: a limit cuts off " in printed and "checks passed, 0 warnings, 2 errors" in printed
    assert not list(Path("out").glob("checkpoints/step*"))


def test_a_run_warns_and_learns_the_same_as_without_checks(start_model, capsys, monkeypatch, folder):
    monkeypatch.syspath_prepend(folder)
    settings = [f"model.name={start_model()}", "plan.prompts_per_step=4", "plan.steps=1", "data.eval_size=4"]
    run_recipe_here("rloo", *settings, "check.own=[own_checked.few_steps]", "output_dir=checked")
    printed = capsys.readouterr().out
    assert "warn  own_checked.few_steps: 1 steps are few; raise plan.steps" in printed
    summary = re.search(r"^warn  evaluation: 4 held-out .*\n(.+\n)*before the first step: .* warnings, ", printed, re.M)
    assert summary and summary.end() < printed.index('"report"')
    run_recipe_here("rloo", *settings, "check.mode=off", "output_dir=unchecked")
    assert "before the first step" not in capsys.readouterr().out
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert Path("checked", name).read_bytes() == Path("unchecked", name).read_bytes(), name


def test_own_checks_are_refused_before_a_model_is_loaded(start_model):
    for setting, message in (("check.own=[own_checked.mising]", "check.own"), ("check.mode=loud", "check.mode=loud")):
        with pytest.raises(ValueError, match=message):
            run_recipe_here("rloo", "model.name=nowhere/model", "output_dir=out", setting)


def test_a_recipe_without_groups_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["check", "reward_model"])
    assert ended.value.code == 1 and "so no plan, check or server of it; use rloo" in capsys.readouterr().err


def test_wrong_settings_are_reported_in_a_line(check):
    code, lines = check("data.source=nowhere.jsonl")
    assert code == 1 and "nowhere.jsonl" in lines[-1]
