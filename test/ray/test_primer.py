"""RayDataLoadingPrimer: draws of several processes, states, and the end of the dataset."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.collected_rows import check_same_rows
from support.collecting import groups_of
from support.ray_cluster import RAY_GROUP
from support.stored_rows import Drawer
from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.data import PassRatePool, load_prompts
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.embedded import addition_prompts, build_tokenizer
from torchrl_rloo.engines.scripted import ScriptedEngine, ScriptedTurn
from torchrl_rloo.envs import DatasetChatEnv
from torchrl_rloo.envs.transforms import DataLoadingPrimer, DatasetExhaustedError
from torchrl_rloo.modules import vLLMWrapper
from torchrl_rloo.ray import RayDataLoadingPrimer

pytestmark = [pytest.mark.xdist_group(RAY_GROUP), pytest.mark.usefixtures("ray_cluster")]


def dataset(size: int = 8) -> PromptDataset:
    return load_prompts(addition_prompts("train", size=size))


def collect(env: DatasetChatEnv, tokenizer: Any) -> tuple[LLMCollector, ScriptedEngine]:
    engine = ScriptedEngine(lambda request, index: ScriptedTurn(tokenizer("1<|im_end|>")["input_ids"]))
    return LLMCollector(env, vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={})), engine


def test_one_process_draws_as_without_an_actor() -> None:
    local, remote = (
        cls(dataset(), num_generations=2, seed=3, epochs=2) for cls in (DataLoadingPrimer, RayDataLoadingPrimer)
    )
    for groups in (3, 5, 1):
        for one, other in zip(local.draw_groups(groups), remote.draw_groups(groups), strict=True):
            check_same_rows(one, other)
    (prompt, group_id), (same, same_id) = remote.draw(), local.draw()
    assert prompt == same and group_id == same_id == 9 and remote.next_group_id == 10
    assert remote.remaining() == local.remaining() == 6
    remote.requeue([(2, 5)])
    assert remote.num_requeued == 1 and remote.draw_ids(1) == [(2, 5)]
    with pytest.raises(RuntimeError), remote.requeue_on_error():
        drawn = remote.draw_ids(2)
        raise RuntimeError
    assert remote.draw_ids(2) == drawn
    with pytest.raises(DatasetExhaustedError, match="4 draws are left, a batch needs 5"):
        remote.draw_groups(5)


def test_no_two_processes_draw_the_same_group() -> None:
    import ray

    primer = RayDataLoadingPrimer(dataset(), num_generations=2)
    drawers = [ray.remote(Drawer).options(num_cpus=0).remote() for _ in range(2)]
    drawn = ray.get([drawer.draw.remote(primer, 20) for drawer in drawers])
    assert sorted(sum(drawn, [])) == list(range(40)) and primer.next_group_id == 40
    # The draws of a killed process come again once they are re-queued
    ray.kill(drawers[0])
    primer.requeue((group_id % 8, group_id) for group_id in drawn[0])
    assert [group_id for _, group_id in primer.draw_ids(21)] == [*drawn[0], 40]


def test_collectors_share_prompts_and_resume_with_their_open_groups() -> None:
    tokenizer = build_tokenizer()
    make_primer = partial(RayDataLoadingPrimer, actor_name="prompts")

    def make() -> DatasetChatEnv:
        return DatasetChatEnv(dataset(), tokenizer, prompts_per_batch=2, num_generations=2, make_primer=make_primer)

    (one, first), (other, second) = collect(make(), tokenizer), collect(make(), tokenizer)
    assert sorted({*groups_of(one.collect()), *groups_of(other.collect())}) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="actor_name='prompts' has the settings"):
        RayDataLoadingPrimer(dataset(), actor_name="prompts", seed=2)
    one.ledger.lease(1)  # group 4 is open
    state = one.state_dict()
    assert groups_of(other.collect()) == [5, 5, 6, 6]
    one.load_state_dict(state)
    assert groups_of(one.collect()) == [4, 4, 5, 5]
    for part in (one, other):
        part.shutdown()
    first.close()
    second.close()


def test_states_move_between_primers_with_and_without_an_actor_that_may_die() -> None:
    import ray

    remote, local = RayDataLoadingPrimer(dataset(), seed=1), DataLoadingPrimer(dataset(), seed=2)
    remote.draw_ids(3)
    with remote.with_requeued([(7, 1)]):
        local.load_state_dict(remote.state_dict())
    assert remote.num_requeued == 0 and local.num_requeued == 1
    assert local.draw_ids(1) == [(7, 1)] and local.draw_ids(5) == remote.draw_ids(5)
    local.draw_ids(1)
    remote.load_state_dict(local.state_dict())
    assert local.draw_ids(2) == remote.draw_ids(2)
    with pytest.raises(ValueError, match="belongs to a dataset with fingerprint="):
        remote.load_state_dict(DataLoadingPrimer(dataset(4)).state_dict())
    ray.kill(remote._actor)
    with pytest.raises(ray.exceptions.RayActorError):
        remote.draw_groups(1)


def test_learning_samplers_are_refused() -> None:
    with pytest.raises(ValueError, match="sampler=PassRatePool learns from rows"):
        RayDataLoadingPrimer(dataset(), sampler=PassRatePool(8))
