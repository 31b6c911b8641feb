"""RayLLMCollector over a real local cluster: rows equal LLMCollector's, workers die, hang, join and leave."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from tensordict import TensorDictBase

from support.waiting import wait_until
from torchrl_rloo.collectors import GroupSource, LLMCollector, check_audit
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.embedded import addition_prompts, build_model, build_tokenizer
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import FeedbackTransform
from torchrl_rloo.modules import TransformersWrapper, vLLMWrapper
from torchrl_rloo.ray import RayLLMCollector, fleet, worker
from torchrl_rloo.ray.worker import RolloutWorker
from torchrl_rloo.rewards import boxed_accuracy
from torchrl_rloo.run import meters

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("functions_by_value")]

GROUPS, MEMBERS = 4, 4


def make_env(**kwargs) -> DatasetChatEnv:
    prompts = load_prompts(addition_prompts("train", size=64))
    sizes = {"prompts_per_batch": GROUPS, "num_generations": MEMBERS}
    return DatasetChatEnv(prompts, build_tokenizer(), rewards=boxed_accuracy, seed=0, **sizes, **kwargs)


def scripted(latency: float = 0.02) -> vLLMWrapper:
    tokenizer = build_tokenizer()
    end = tokenizer.eos_token_id
    engine = ScriptedEngine(lambda request, _: ScriptedTurn([5 + request.seed % 50, end], latency=latency))
    return vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})


def local_model() -> TransformersWrapper:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})


def assert_equal(rows: TensorDictBase, others: TensorDictBase) -> None:
    assert len(rows) == len(others)
    for row, other in zip(rows.unbind(0), others.unbind(0), strict=True):
        assert set(row.keys(True, True)) == set(other.keys(True, True))
        for key in row.keys(True, True):
            value, found = row.get(key), other.get(key)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value.nan_to_num(-7), found.nan_to_num(-7)), key
            else:
                assert value == found, key


@pytest.fixture
def collect_with():
    """``collect_with(**arguments)``: a collector, which is shut down after the test."""
    made = []

    def make(policy=scripted, env=make_env, **arguments) -> RayLLMCollector:
        made.append(RayLLMCollector(env, policy_factory=policy, seed=0, **arguments))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown(raise_on_error=False)


@pytest.mark.parametrize("policy", [scripted, local_model])
def test_one_worker_gives_the_rows_of_llm_collector(policy, collect_with):
    remote, local = collect_with(policy), LLMCollector(make_env(), policy(), seed=0)
    for _ in range(3):
        assert_equal(remote.collect(), local.collect())
    assert (remote.dialog_turns, remote.num_tokens) == (local.dialog_turns, local.num_tokens)
    # A resumed collector of the other kind continues with the same rows
    remote.load_state_dict(state := local.state_dict())
    assert list(state) == list(remote.state_dict())
    assert_equal(remote.collect(), local.collect())
    local.shutdown()


def test_killed_workers_lose_no_group(collect_with, tmp_path: Path):
    rng, audit, kills = random.Random(0), tmp_path / "audit.jsonl", 0
    collector = collect_with(num_workers=2, max_staleness=1, audit=audit)
    seen: list[int] = []
    for _ in range(6):
        rows = collector.collect()
        seen += sorted(set(rows[keys.GROUP_ID].tolist()))
        if (ready := collector.runner.fleet.ready()) and kills < 3:
            os.kill(rng.choice(ready).facts["pid"], signal.SIGKILL)
            kills += 1
            wait_until(lambda kills=kills: collector.counts.get("workers/lost") == kills)
    assert kills == 3 and len(seen) == len(set(seen)) == 6 * GROUPS
    assert collector.counts["workers/lost"] == kills
    check_audit(audit)


class DiesOnce(RolloutWorker):
    """Worker that dies after it has sent a group's result, and before the group's rows."""

    died: Path

    async def run(self, *args):
        async for item in super().run(*args):
            yield item
            if not self.died.exists():
                self.died.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_may_die_before_the_rows_of_a_result(collect_with, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(DiesOnce, "died", tmp_path / "died", raising=False)
    monkeypatch.setattr(fleet, "RolloutWorker", DiesOnce)
    collector = collect_with()
    rows = collector.collect()
    assert sorted(set(rows[keys.GROUP_ID].tolist())) == list(range(GROUPS)) and len(rows) == GROUPS * MEMBERS
    assert collector.counts["workers/lost"] == 1 and DiesOnce.died.exists()


def fail_in_half_of_the_groups(conversation, row) -> None:
    if int(row[keys.GROUP_ID]) % 2:
        raise ValueError("no answer")


def half_finite(completions, **_) -> list[float]:
    return [float("inf"), *([1.0] * (len(completions) - 1))]


def counting_env() -> DatasetChatEnv:
    prompts, sizes = load_prompts(addition_prompts("train", size=64)), {"prompts_per_batch": 4, "num_generations": 4}
    transforms = [FeedbackTransform(fail_in_half_of_the_groups)]
    return DatasetChatEnv(prompts, build_tokenizer(), rewards=half_finite, seed=0, transforms=transforms, **sizes)


def test_counters_of_tools_and_rewards_reach_the_driver_once(collect_with):
    local = LLMCollector(counting_env(), scripted(), seed=0)
    remote = collect_with(env=counting_env)

    def found(collector) -> dict[str, float]:
        counts, kinds = meters(*GroupSource(collector).parts), ("count/feedback/", "count/rewards/")
        return {name: number for name, number in counts.items() if name.startswith(kinds)}

    for _ in range(2):
        local.collect()
        remote.collect()
        wait_until(lambda: found(remote) == found(local))
        os.kill(remote.runner.fleet.workers[0].facts["pid"], signal.SIGKILL)
    assert found(local) == {"count/feedback/failed": 16, "count/rewards/half_finite/not_finite": 4}
    local.shutdown()


def test_a_hung_worker_is_replaced_and_workers_join_and_leave(collect_with):
    collector = collect_with(beat_timeout=2.0)
    collector.collect()
    pid = collector.runner.fleet.workers[0].facts["pid"]
    os.kill(pid, signal.SIGSTOP)
    assert len(collector.collect()) == GROUPS * MEMBERS
    assert collector.counts["workers/lost"] == 1
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    # Another worker takes the place of the first one
    assert collector.add_worker() == 1
    wait_until(lambda: collector.metrics()["workers/ready"] == 2, 60)
    collector.remove_worker(0)
    assert collector.worker_numbers == [1]
    rows = collector.collect()
    assert sorted(set(rows[keys.GROUP_ID].tolist())) == [8, 9, 10, 11] and collector.counts["workers/lost"] == 1
    with pytest.raises(ValueError, match="number=0 must be that of a worker"):
        collector.remove_worker(0)


def test_references_have_the_rows_that_collect_returns_and_replace_lost_ones(collect_with):
    by_reference, whole = collect_with(), collect_with()
    references = by_reference.collect_references()
    rows = whole.collect()
    assert_equal(references.fetch(), rows)
    assert_equal(references.fetch([9, 2]), rows[[9, 2]])
    assert references.metadata[keys.REWARD].shape == (GROUPS * MEMBERS, 1, 1)
    assert references.metadata[keys.TOKEN_COUNT].tolist() == [len(row[keys.TOKENS]) for row in rows.unbind(0)]
    assert not {"tokens", "query", keys.COMPLETION} & set(references.metadata.keys())
    # Groups that the store loses are sampled again
    again = by_reference.replace_lost([1, 3])
    assert again.group_ids == [1, 3] and by_reference.counts["workers/lost_groups"] == 2
    lost = references.fetch([*range(4, 8), *range(12, 16)])
    assert_equal(again.fetch().exclude(keys.TRAJECTORY_ID), lost.exclude(keys.TRAJECTORY_ID))
    assert sorted(set(by_reference.collect()[keys.GROUP_ID].tolist())) == [4, 5, 6, 7]


def test_rows_that_have_just_arrived_are_kept(collect_with):
    """The ledger learns of a completed group a moment after its rows have arrived."""
    collector = collect_with(lambda: scripted(latency=0.5), max_staleness=1)
    first = collector.collect_references()
    (leased, *_) = [group for group in collector.ledger.groups.values() if group.state.value == "leased"]
    collector.runner.objects[leased.group_id, leased.attempt] = "rows"
    collector._call_on_loop(collector._begin_batch)
    assert collector.runner.objects[leased.group_id, leased.attempt] == "rows"
    assert not any(group in first.group_ids for group, _ in collector.runner.objects)


def test_an_environment_that_cannot_be_made_is_reported_at_once(collect_with):
    def missing():
        raise FileNotFoundError("no such checkpoint: nowhere")

    with pytest.raises(RuntimeError, match="no rollout worker is left.*FileNotFoundError: no such checkpoint"):
        collect_with(missing).collect()


class Odd(Exception):
    """Error that cannot be unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def test_an_error_of_the_environment_reaches_the_caller(collect_with):
    def broken() -> vLLMWrapper:
        def fail(request, index):
            raise Odd("one", "two")

        tokenizer = build_tokenizer()
        return vLLMWrapper(ScriptedEngine(fail), tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 4})

    collector = collect_with(broken, max_consecutive_failures=3)
    with pytest.raises(RuntimeError, match="failed on 3 consecutive turns.*one and two"):
        collector.collect()
    assert str(worker.portable(Odd("one", "two"))) == "Odd: one and two"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers=0 must be at least 1"),
        ({"policy": scripted()}, "exactly one of policy and policy_factory"),
        ({"beat_timeout": 0.0}, "beat_timeout=0.0 must be above 0"),
        ({"max_worker_restarts": -1}, "max_worker_restarts=-1"),
        ({"ahead": -1}, "ahead=-1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        RayLLMCollector(make_env, **{"policy_factory": scripted} | arguments)


def test_another_input_mode_is_refused_before_a_worker_starts():
    policy = scripted().get_new_version(input_mode="text")
    with pytest.raises(ValueError, match="input_mode='text' of the policy cannot be combined with input_mode='tokens'"):
        RayLLMCollector(make_env, policy)
