"""Bundles of a step: honest ones verify, each kind of tampering is named, and hostile files are refused."""

from __future__ import annotations

import copy
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDictBase

from torchrl_rloo.cli.main import main
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import keys, load_prompts, pack_rows, stack_rows, tensor_rows
from torchrl_rloo.diagnostics import Bundle, BundleError, make_bundle, read_bundle, verify_bundle, write_bundle
from torchrl_rloo.diagnostics.bundle_verify import SAFE_REWARDS
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.modules import TransformersWrapper, save_model
from torchrl_rloo.objectives import RLOOLoss
from torchrl_rloo.replay import MCAdvantage
from torchrl_rloo.replay.row_format import encode_rows
from torchrl_rloo.rewards import load_reward

GENERATE = {"max_new_tokens": 6, "temperature": 0.9}


def vowels(completions, **columns):
    return [float(sum(letter in "aeiou0248" for letter in messages[-1]["content"])) for messages in completions]


@pytest.fixture(scope="module")
def made() -> tuple[Bundle, Any, Any]:
    """Bundle of a step of three groups, whose rewards depend on the text; with model and tokenizer."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=GENERATE | {"seed": 5})
    env = DatasetChatEnv(
        load_prompts(addition_prompts("train", size=8)),
        tokenizer,
        prompts_per_batch=3,
        num_generations=4,
        rewards=vowels,
    )
    collector = LLMCollector(env, policy)
    sampled = collector.collect()
    collector.shutdown()
    loss = {"ratio": "token", "aggregation": "token_mean", "entropy_coeff": 0.01}
    advantage = {"estimator": "rloo", "num_generations": 4}
    rows = MCAdvantage(**advantage).inv(tensor_rows(sampled))
    bundle = make_bundle(
        rows,
        RLOOLoss(policy.get_new_version(generate=False), **loss),
        step=7,
        model="tiny",
        settings={"loss": loss, "advantage": advantage, "kl": None, "scoring": {"precision": "float32"}},
        notes={"rewards": ["vowels"], "weights": [1.0], "clip_range": None, "generate": GENERATE},
        texts=[sampled],
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    return bundle, model, tokenizer


@pytest.fixture
def stored(made, tmp_path: Path) -> Path:
    write_bundle(tmp_path / "honest.bundle", made[0])
    return tmp_path / "honest.bundle"


def test_an_honest_bundle_agrees_with_and_without_its_model(made, stored):
    _, model, tokenizer = made
    alone = verify_bundle(read_bundle(stored))
    assert alone.ok and set(alone.agreed) == {"return", "advantage", "sampler log-prob", "loss"}
    assert alone.skipped.keys() == {"score", "weights", "log-prob", "gradient norm"}
    assert "vowels" in alone.skipped["score"]
    whole = verify_bundle(read_bundle(stored), model=model, tokenizer=tokenizer, rewards=[vowels])
    assert whole.ok and not whole.skipped and len(whole.agreed) == 8, whole.report()
    assert all(name == "exact_match" or load_reward(name) for name in SAFE_REWARDS)


Change = Callable[[list[TensorDictBase], dict[str, Any]], None]
FIRST_ACTION = "first action token"


def first_action(row: TensorDictBase) -> int:
    return int(row[keys.ACTION_MASK].int().argmax())


def set_at(key: Any, value: Callable[[Any], Any], place: Any = 0) -> Change:
    def change(rows: list[TensorDictBase], content: dict[str, Any]) -> None:
        entry, at = rows[5][key].reshape(-1), first_action(rows[5]) if place == FIRST_ACTION else place
        entry[at] = value(entry[at])

    return change


def set_content(value: Any, *path: str) -> Change:
    def change(rows: list[TensorDictBase], content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


def set_text(rows: list[TensorDictBase], content: dict[str, Any]) -> None:
    rows[5].set(keys.COMPLETION, NonTensorData([{"role": "assistant", "content": "aaaaaaaaaaaaaaaa"}]))


TAMPERED: dict[str, tuple[Change, dict[str, Any]]] = {
    # name: (change, quantity -> place of its first difference: row 5, its first action token, or the whole step)
    "score": (set_at(keys.REWARDS, lambda v: v + 1), {"score vowels": "row", "return": "row"}),
    "text": (set_text, {"score vowels": "row"}),
    "reward": (set_at(keys.REWARD, lambda v: v + 0.5), {"return": "row", "advantage": "group"}),
    "advantage": (set_at(keys.ADVANTAGE, lambda v: v + 0.5), {"advantage": "row"}),
    "sampler log-prob": (set_at(keys.LOG_PROBS, lambda v: v - 0.01, FIRST_ACTION), {"sampler log-prob": "token"}),
    "trainer log-prob": (set_at(keys.PROXIMAL_LOG_PROBS, lambda v: v - 0.01, FIRST_ACTION), {"log-prob": "token"}),
    "token": (set_at(keys.TOKENS, lambda v: (v + 3) % 40, FIRST_ACTION), {"log-prob": "token"}),
    "mask": (set_at(keys.ACTION_MASK, lambda v: False, FIRST_ACTION), {"log-prob": "token"}),
    "weights": (set_content("0", "weights", "model.norm.weight"), {"weights": "step"}),
    "loss": (set_content(1.0, "expected", "loss"), {"loss": "step"}),
    "gradient": (set_content(1e3, "expected", "grad_norm"), {"gradient norm": "step"}),
    "estimator": (set_content("grpo", "settings", "advantage", "estimator"), {"advantage": "any"}),
    "surrogate": (set_content(5.0, "settings", "loss", "entropy_coeff"), {"loss": "step", "gradient norm": "step"}),
    "reward weights": (set_content([2.0], "notes", "weights"), {"return": "any"}),
    "temperature": (set_content({"temperature": 2.0}, "notes", "generate"), {"log-prob": "any"}),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_tampering_is_named_although_the_checksums_fit(made, tmp_path, name):
    bundle, model, tokenizer = made
    change, expected = TAMPERED[name]
    rows, content = [row.clone() for row in bundle.rows.unbind(0)], copy.deepcopy(bundle.content)
    change(rows, content)
    write_bundle(tmp_path / "tampered.bundle", Bundle(stack_rows(rows), content))
    result = verify_bundle(
        read_bundle(tmp_path / "tampered.bundle"), model=model, tokenizer=tokenizer, rewards=[vowels]
    )
    assert not result.ok
    token = first_action(bundle.rows[5])
    for quantity, place in expected.items():
        first = next(difference for difference in result.differences if difference.quantity == quantity)
        assert quantity in result.report() and quantity not in result.agreed
        if place in ("row", "token"):
            assert (first.row, first.token) == (5, token if place == "token" else None), first
        elif place == "group":  # rows 4 to 7
            assert 4 <= first.row <= 7
        elif place == "step":
            assert first.row is None


def test_damaged_bytes_are_refused(stored, tmp_path):
    content, generator = stored.read_bytes(), random.Random(0)
    damaged = tmp_path / "damaged.bundle"
    for _ in range(60):
        place = generator.randrange(len(content))
        flipped = bytes([content[place] ^ (1 << generator.randrange(8))])
        damaged.write_bytes(content[:place] + flipped + content[place + 1 :])
        with pytest.raises(BundleError, match=r"damaged.bundle is not a bundle that can be verified"):
            read_bundle(damaged)
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(BundleError):
        read_bundle(damaged)


class Executes:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_hostile_files_are_refused_and_nothing_runs(made, stored, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundle, model, tokenizer = made
    hostile = tmp_path / "hostile.bundle"
    hostile.write_bytes(pickle.dumps(Executes()))
    with pytest.raises(BundleError):
        read_bundle(hostile)
    packed = pack_rows(bundle.rows)
    deep = json_deep = []
    for _ in range(5_000):
        json_deep.append([])
        json_deep = json_deep[0]
    for index in ({"groups": []}, {"bundle": 2}, {"bundle": 1, "content": {}}, {"bundle": 1, "content": [1]}):
        hostile.write_bytes(encode_rows(packed, index))
        with pytest.raises(BundleError):
            read_bundle(hostile)
    with pytest.raises(RecursionError):
        encode_rows(packed, {"bundle": 1, "content": deep})
    (tmp_path / "link.bundle").symlink_to(stored)
    for path in ("/dev/zero", tmp_path / "link.bundle"):
        with pytest.raises(OSError):
            read_bundle(path)
    # Settings of a stranger name no code
    for change, refused in (
        (set_content({"actor_network": "os.system"}, "settings", "loss"), "unknown argument 'actor_network'"),
        (set_content({"ratio": "os.system"}, "settings", "loss"), "ratio='os.system' is unknown"),
        (set_content({"estimator": {"name": "x"}}, "settings", "advantage"), "is unknown"),
        (set_content({"temperature": "x"}, "notes", "generate"), "cannot be used"),
        (set_content("x", "expected", "loss"), "cannot be used"),
    ):
        content = copy.deepcopy(bundle.content)
        change([], content)
        write_bundle(hostile, Bundle(bundle.rows, content))
        with pytest.raises(BundleError, match=refused):
            verify_bundle(read_bundle(hostile), model=model, tokenizer=tokenizer)
    content = copy.deepcopy(bundle.content)
    content["notes"]["functions"] = ["os.system"]
    assert "vowels" in verify_bundle(Bundle(bundle.rows, content)).skipped["score"]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("key", [keys.TOKENS, keys.LOG_PROBS, keys.ADVANTAGE, keys.REWARD, keys.REWARDS])
def test_rows_that_lack_an_entry_or_a_value_are_refused(made, tmp_path, key):
    bundle = made[0]
    rows = [row.clone() for row in bundle.rows.unbind(0)]
    rows[2].set(key, torch.cat([rows[2][key]] * 2, -1))
    write_bundle(tmp_path / "odd.bundle", Bundle(stack_rows(rows), bundle.content))
    with pytest.raises(BundleError, match="row 2"):
        read_bundle(tmp_path / "odd.bundle")


def test_a_token_that_the_model_lacks_is_refused(made, tmp_path):
    bundle, model, tokenizer = made
    rows = [row.clone() for row in bundle.rows.unbind(0)]
    rows[0][keys.TOKENS][0] = 10**6
    with pytest.raises(ValueError, match="token id 1000000 must be below the"):
        verify_bundle(Bundle(stack_rows(rows), bundle.content), model=model, tokenizer=tokenizer)


def test_the_command_prints_quantities_and_exits_with_1(made, stored, tmp_path, capsys):
    bundle, model, tokenizer = made
    save_model(model, tokenizer, tmp_path / "model")
    main(["verify", str(stored), "--model", str(tmp_path / "model")])
    out = capsys.readouterr().out
    assert "step 7 of tiny, 12 rows" in out and "gradient norm        agrees: " in out
    content = copy.deepcopy(bundle.content)
    content["expected"]["loss"] = 3.0
    write_bundle(stored, Bundle(bundle.rows, content))
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(stored)])
    assert ended.value.code == 1 and "loss: stored 3 but found" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "missing.bundle")])
    assert capsys.readouterr().err.startswith("error: ")
