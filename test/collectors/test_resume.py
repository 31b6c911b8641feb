"""Tests of checkpoints: a resumed collector loses and repeats no group, and continues with the same rows."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.collecting import UNDELIVERED, G, Gate, assert_same, groups_of, in_state
from support.waiting import PATIENCE, in_thread, wait_until
from torchrl_rloo.data import keys
from torchrl_rloo.weight_update import InProcessWeightUpdater


def test_requeued_draws_come_first(make_env) -> None:
    env = make_env(epochs=1)
    primer = env.primer
    drawn = [(int(r[0][keys.PROMPT_ID]), int(r[0][keys.GROUP_ID])) for r in primer.draw_groups(5)]
    primer.requeue(drawn[3:])
    primer.requeue(drawn[:2])
    assert primer.remaining() == 2 + 4
    state = copy.deepcopy(env.state_dict())
    again = [
        (int(row[keys.PROMPT_ID]), int(row[keys.GROUP_ID])) for _ in range(3) for row in env.reset().unbind(0)[::G]
    ]
    assert again == [*drawn[:2], *drawn[3:], (5, 5), (6, 6)] and primer.remaining() == 0
    other = make_env(epochs=1)
    other.load_state_dict(state)
    assert groups_of(other.reset())[::G] == [0, 1]
    with other.primer.with_requeued(drawn[:2]):
        assert other.primer.remaining() == 6
    assert other.primer.remaining() == 4


@pytest.mark.parametrize("stop", range(5))
def test_a_resumed_run_loses_and_repeats_no_group(stop: int, scripted: Callable) -> None:
    """After a stop at any point of a batch, groups in flight are drawn again under the same ids."""
    kwargs = {"epochs": 2, "prompts_per_batch": 2, "shuffle": True}
    expected = {}
    for rows in scripted(Gate(turns=2), **kwargs):
        expected |= {int(row[keys.GROUP_ID]): int(row[keys.PROMPT_ID]) for row in rows.unbind(0)}
    gate = Gate(closed=set(range(stop, 99)), turns=2)
    collector = scripted(gate, ahead=stop, **kwargs)
    delivered: list[int] = []
    for _ in range(stop // 2):
        delivered += groups_of(collector.collect())
    collecting = in_thread(collector.collect)
    begun = 2 + stop - (stop % 2)  # whole batches of the remaining draws
    wait_until(lambda: len(gate.waiting | in_state(collector, "complete")) >= begun)
    state = copy.deepcopy(collector.state_dict())
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collecting.result(PATIENCE)
    resumed = scripted(Gate(turns=2), **kwargs)
    resumed.load_state_dict(state)
    for rows in resumed:
        delivered += groups_of(rows)
        prompts = {int(row[keys.GROUP_ID]): int(row[keys.PROMPT_ID]) for row in rows.unbind(0)}
        assert prompts == {g: expected[g] for g in groups_of(rows)}
    assert Counter(delivered) == dict.fromkeys(range(14), G)


def test_a_state_may_be_taken_while_conversations_run(scripted: Callable) -> None:
    """Each of many states taken in another thread resumes with exactly the groups that its batches lack."""
    collector = scripted(Gate(turns=3), ahead=3, epochs=4, prompts_per_batch=4)
    states, batches, done = [], [], threading.Event()

    def watch() -> None:
        while not done.is_set():
            states.append(copy.deepcopy(collector.state_dict()))
            time.sleep(0.001)

    watching = in_thread(watch)
    for _ in range(7):
        batches.append(set(groups_of(collector.collect())))
    done.set()
    watching.result(PATIENCE)
    assert sorted(g for batch in batches for g in batch) == list(range(28)) and len(states) > 1
    for state in states[:: max(1, len(states) // 4)]:
        resumed = scripted(Gate(turns=1), epochs=4, prompts_per_batch=4)
        resumed.load_state_dict(state)
        rest = [g for rows in resumed for g in set(groups_of(rows))]
        before = set().union(*batches[: state["totals"][0]])
        assert sorted(rest) == sorted(set(range(28)) - before)


def test_loading_a_state_cancels_groups_in_flight(scripted: Callable) -> None:
    gate = Gate(closed={1})
    collector = scripted(gate, ahead=2)
    state = copy.deepcopy(collector.state_dict())
    collector.collect()
    collector.load_state_dict(state)
    assert not gate.state and not collector.counts and not collector.ledger.groups
    gate.closed.clear()
    assert set(groups_of(collector.collect())) | in_state(collector, *UNDELIVERED) == {0, 1, 2, 3}


def test_explicit_acknowledgement(scripted: Callable) -> None:
    """A state re-queues groups that were returned and not acknowledged."""
    kwargs = {"auto_acknowledge": False, "epochs": 1}
    collector = scripted(Gate(), **kwargs)
    for unknown in ([0], [99]):
        with pytest.raises(KeyError, match="is not delivered"):
            collector.acknowledge(unknown)
    collector.collect()
    with pytest.raises(KeyError, match="group_id=7"):
        collector.acknowledge([0, 7])
    assert collector.acknowledge([1]) == 1 and collector.acknowledge([]) == 0
    with pytest.raises(KeyError, match="group_id=1"):
        collector.acknowledge([1])
    collector.collect()
    state = copy.deepcopy(collector.state_dict())
    assert collector.acknowledge() == 3 and collector.counts["ledger/acknowledged"] == 4
    resumed = scripted(Gate(), **kwargs)
    resumed.load_state_dict(state)
    assert [g for rows in resumed for g in groups_of(rows)[::G]] == [0, 2, 3, 4, 5, 6]
    # By default the next call of collect or state_dict acknowledges
    plain = scripted(Gate())
    plain.collect()
    assert "ledger/acknowledged" not in plain.counts
    plain.collect()
    assert plain.counts["ledger/acknowledged"] == 2
    plain.state_dict()
    assert plain.counts["ledger/acknowledged"] == 4


@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_resumed_collector_continues_with_the_same_rows(
    before: int, turns: int, modeled: Callable, random_model, tmp_path: Path
) -> None:
    updater = lambda: InProcessWeightUpdater(random_model, random_model)  # noqa: E731
    collector = modeled(turns=turns, weight_updater=updater(), epochs=4)
    for _ in range(before):
        collector.collect()
        collector.update_policy_weights_()
    torch.save(collector.state_dict(), tmp_path / "state.pt")
    torch.manual_seed(0)
    expected = [collector.collect() for _ in range(4)]
    resumed = modeled(turns=turns, weight_updater=updater(), epochs=4, seed=7)
    resumed.collect()
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.policy_version == before
    torch.manual_seed(1)
    for rows in expected:
        assert_same(resumed.collect(), rows)
    assert resumed.dialog_turns == collector.dialog_turns
    assert expected[0][keys.POLICY_VERSION].tolist() == [before] * 6
