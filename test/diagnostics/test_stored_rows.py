"""New rewards for stored rows: comparison with the old ones, rows that carry them, and rows scored by a model."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData

from support.stored_rows import make_row
from torchrl_rloo.cli.main import main
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, stack_rows
from torchrl_rloo.data.stop_reasons import STOP_REASONS
from torchrl_rloo.diagnostics import Rescorer, rescore
from torchrl_rloo.diagnostics.stored_rows import compare_rewards, replay_groups
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, save_model
from torchrl_rloo.replay import RolloutFiles, RolloutWriter
from torchrl_rloo.rewards import boxed_accuracy

NOTES = {"rewards": ["old"], "weights": [2.0], "clip_range": None}


def last_digit(completions, trainer_state, **columns):
    """Score 1 for 'answer 0', 0.75 for 'answer 1', ...; abstain on the fourth."""
    numbers = [int(messages[-1]["content"].split()[-1]) for messages in completions]
    assert trainer_state.global_step in (2, 3)
    return [None if number == 3 else 1 - number / 4 for number in numbers]


def store(folder: Path) -> None:
    """Store two steps of two groups, whose scores are the numbers of their members; -0.5 of each return is a KL."""
    writer = RolloutWriter(folder, model="tiny", tokenizer="0" * 64, notes=NOTES)
    for step, group_ids in ((3, (1, 2)), (4, (3, 4))):
        writer.step = step
        rows = [make_row(group, member, 4) for group in group_ids for member in range(4)]
        for row in rows:
            score = 1.0 if int(row[keys.GROUP_ID]) == 4 else float(row[keys.REWARD])
            row.set(keys.REWARDS, torch.tensor([score])).set(keys.REWARD, torch.full((1, 1), 2 * score - 0.5))
        writer.extend(stack_rows(rows))


def test_rewards_advantages_dead_groups_and_ranking_are_compared(tmp_path):
    store(tmp_path / "rows")
    rescorer = Rescorer(last_digit, weights=[3.0])
    result = rescore(RolloutFiles(tmp_path / "rows"), rescorer, output=tmp_path / "new")
    assert (result.rows, result.groups, result.changed_rewards) == (16, 4, 16)
    assert result.old["reward"] == 2 * (3 * 1.5 + 1) / 4 and result.new["reward"] == 3 * 0.75
    assert result.old["functions"] == {"old": 1.375} and result.new["functions"] == {"last_digit": 0.75}
    assert (result.old["dead_groups"], result.new["dead_groups"]) == (1, 0) and result.revived == 1
    assert (result.old["abstained"], result.new["abstained"]) == (0, 4)
    assert result.rank_agreement == -1.0 and result.same_best == 0.0
    assert set(result.most_changed) == {1, 2, 3, 4} and result.most_changed[-1] == 4
    lines = result.table().splitlines()
    assert lines[0] == "16 rows in 4 groups, advantages: rloo"
    assert [line.split()[-3:] for line in lines if line.startswith("groups without")] == [["1", "0", "-1"]]
    # The rows keep all other entries, their KL, files and steps
    old, new = RolloutFiles(tmp_path / "rows"), RolloutFiles(tmp_path / "new")
    assert [file.step for file in new.files()] == [3, 4] and new.notes()["rewards"] == ["last_digit"]
    for (before, rows), (after, rescored) in zip(old.groups(), new.groups(), strict=True):
        assert before.group_id == after.group_id
        for member, (a, b) in enumerate(zip(rows.unbind(0), rescored.unbind(0), strict=True)):
            assert torch.equal(a[keys.TOKENS], b[keys.TOKENS]) and a[keys.COMPLETION] == b[keys.COMPLETION]
            expected = math.nan if member == 3 else 3 * (1 - member / 4) - 0.5
            assert float(b[keys.REWARD]) == pytest.approx(expected, nan_ok=True)
    with pytest.raises(ValueError, match="has rows already; name a new folder"):
        rescore(old, rescorer, output=tmp_path / "new")
    assert rescore(old, rescorer, step=4).groups == 2
    with pytest.raises(ValueError, match="has no rows of step 9"):
        rescore(old, rescorer, step=9)


def test_the_stored_rewards_give_no_difference(tmp_path):
    store(tmp_path)

    def old(completions, **columns):
        numbers = [int(messages[-1]["content"].split()[-1]) for messages in completions]
        return [
            1.0 if "4" in prompt[-1]["content"] else n for n, prompt in zip(numbers, columns["prompts"], strict=True)
        ]

    result = rescore(RolloutFiles(tmp_path), Rescorer(old, weights=[2.0]))
    assert (result.changed_rewards, result.changed_signs, result.most_changed) == (0, 0, [])
    assert result.rank_agreement == pytest.approx(1.0) and result.same_best == 1.0 and result.old == result.new


def test_failed_conversations_are_not_scored_and_failing_functions_are_counted(tmp_path):
    rows = [make_row(1, member) for member in range(2)] + [make_row(2, member) for member in range(2)]
    rows[1].set(keys.STOP_REASON, torch.tensor(list(STOP_REASONS).index("failed")))
    seen = []

    def picky(completions, **columns):
        seen.append(len(completions))
        if any("answer 1" in messages[-1]["content"] for messages in completions):
            raise RuntimeError("no")
        return [1.0] * len(completions)

    RolloutWriter(tmp_path, model="tiny", tokenizer="0" * 64).extend(stack_rows(rows))
    result = rescore(RolloutFiles(tmp_path), Rescorer(picky))
    assert seen == [3, 1, 1, 1] and result.new["abstained"] == 2 and result.new["dead_groups"] == 2
    assert result.failures["picky/raised"] == 1 and "picky/raised 1" in result.table()


def slow_tau(x: list[float], y: list[float]) -> float:
    """Compute Kendall's tau-b by counting pairs."""
    concordant = discordant = ties_x = ties_y = 0
    for i, j in itertools.combinations(range(len(x)), 2):
        a, b = (x[i] > x[j]) - (x[i] < x[j]), (y[i] > y[j]) - (y[i] < y[j])
        concordant, discordant = concordant + (a * b > 0), discordant + (a * b < 0)
        ties_x, ties_y = ties_x + (a == 0 != b), ties_y + (b == 0 != a)
    decided = concordant + discordant
    return (concordant - discordant) / math.sqrt((decided + ties_x) * (decided + ties_y))


def test_the_comparison_is_that_of_a_slow_reference():
    generator = torch.Generator().manual_seed(0)
    old, new = (torch.randint(0, 4, (60,), generator=generator).float() for _ in range(2))
    new[::7] = torch.nan
    ids = torch.randint(0, 9, (60,), generator=generator) * 100
    result = compare_rewards(old, new, ids)
    taus, kept, dead, signs = [], [], [0, 0], 0
    for group in ids.unique().tolist():
        members = [i for i in range(60) if ids[i] == group]
        advantages = []
        for k, rewards in enumerate((old, new)):
            given = {i: float(rewards[i]) for i in members if not rewards[i].isnan()}
            dead[k] += len(set(given.values())) < 2
            n, total = len(given), sum(given.values())
            advantages.append(
                [given[i] - (total - given[i]) / (n - 1) if i in given and n > 1 else 0.0 for i in members]
            )
        both = [i for i in members if not new[i].isnan()]
        x, y = [float(old[i]) for i in both], [float(new[i]) for i in both]
        if len(set(x)) > 1 and len(set(y)) > 1:
            taus.append(slow_tau(x, y))
            kept.append(any(a == max(x) and b == max(y) for a, b in zip(x, y, strict=True)))
        rounded = [[round(a, 4) for a in each] for each in advantages]
        signs += sum((a > 0) - (a < 0) != (b > 0) - (b < 0) for a, b in zip(*rounded, strict=True))
    assert result.rank_agreement == pytest.approx(sum(taus) / len(taus))
    assert result.same_best == pytest.approx(sum(kept) / len(kept))
    assert [result.old["dead_groups"], result.new["dead_groups"]] == dead and result.changed_signs == signs


@pytest.fixture(scope="module")
def sampled(tmp_path_factory) -> tuple[Path, object, object]:
    """Folder of the rows of a tiny model, and the model."""
    folder, tokenizer = tmp_path_factory.mktemp("sampled"), build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    generate = {"max_new_tokens": 4, "temperature": 0.8}
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=generate | {"seed": 1})
    prompts = load_prompts(addition_prompts("train", size=4))
    env = DatasetChatEnv(prompts, tokenizer, prompts_per_batch=2, num_generations=3, rewards=boxed_accuracy)
    notes = {"rewards": ["boxed_accuracy"], "weights": [1.0], "clip_range": None, "generate": generate}
    writer = RolloutWriter(folder / "rows", model="tiny", tokenizer=tokenizer, notes=notes)
    collector = LLMCollector(env, policy, postproc=writer)
    collector.collect()
    collector.shutdown()
    save_model(model, tokenizer, folder / "model")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.5)
    save_model(model, tokenizer, folder / "other")
    return folder, model, tokenizer


def test_rows_are_scored_again_by_a_model(sampled, tmp_path, capsys):
    folder, other, tokenizer = sampled
    scorer = TransformersWrapper(other, tokenizer=tokenizer, generate=False, generate_kwargs={"temperature": 0.8})
    files = RolloutFiles(folder / "rows")
    replayed = replay_groups(files, scorer, groups=[1])
    assert replayed.rows[keys.GROUP_ID].tolist() == [1, 1, 1]
    for row, line in zip(replayed.rows.unbind(0), replayed.table().splitlines()[1:], strict=True):
        difference = (row[keys.PROXIMAL_LOG_PROBS] - row[keys.LOG_PROBS])[row[keys.ACTION_MASK]].abs()
        old, new = (float(line.split()[place]) for place in (-3, -1))
        assert abs(new - old) == pytest.approx(float(difference.max()), abs=2e-4) and difference.max() > 1e-3
    assert replayed.table(1).splitlines()[-1] == "and 2 more rows"
    with pytest.raises(ValueError, match="has no group 77; choose another"):
        replay_groups(files, scorer, groups=[77])
    # The model that sampled gives the stored log-probs, and another one does not
    page = tmp_path / "page.html"
    for model, least, most in (("model", 0.0, 1e-4), ("other", 1e-4, 10.0)):
        main(["replay", str(folder / "rows"), "--model", str(folder / model), "--group", "0", "--output", str(page)])
        lines = capsys.readouterr().out.splitlines()
        changes = [float(line.split()[4]) for line in lines[1:4]]
        assert len(lines) == 5 and all(least <= change <= most for change in changes)
        assert page.read_text().count('"new_log_probs":') == 3


def test_the_command_prints_a_table_and_writes_numbers_and_rows(sampled, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "def long(completion_ids, **columns):\n    return [len(ids) for ids in completion_ids]\n"
    )
    rows, numbers = str(sampled[0] / "rows"), tmp_path / "new.json"
    options = ["--weights", "1", "0.5", "--clip", "-1", "2", "--json", str(numbers), "--output", "new"]
    main(["rescore", rows, "--rewards", "boxed_accuracy,mine.long", *options])
    out = capsys.readouterr().out
    assert "6 rows in 2 groups" in out and "mine" not in out and "long" in out
    assert json.loads(numbers.read_text())["new"]["functions"]["boxed_accuracy"] == 0.0
    assert RolloutFiles("new").notes()["clip_range"] == [-1.0, 2.0]
    for argv, message in (
        (["rescore", "nowhere", "--rewards", "boxed_accuracy"], "nowhere has no stored rows; name a folder"),
        (["rescore", rows, "--rewards", "boxed"], "unknown reward 'boxed'"),
        (["rescore", rows, "--rewards", "boxed_accuracy", "--weights", "1", "2"], "must have one number for each of 1"),
        (["rescore", rows, "--rewards", "boxed_accuracy", "--estimator", "rlo"], "estimator='rlo' is unknown"),
    ):
        with pytest.raises(SystemExit):
            main(argv)
        assert message in capsys.readouterr().err


def test_rows_without_text_cannot_be_scored(tmp_path):
    RolloutWriter(tmp_path, model="tiny", tokenizer="0" * 64, text=False).extend(
        stack_rows([make_row(1, 0).set("x", NonTensorData("y")), make_row(1, 1)])
    )
    with pytest.raises(ValueError, match=r"store them with RolloutWriter\(text=True\)"):
        rescore(RolloutFiles(tmp_path), Rescorer("boxed_accuracy"))
