"""Tests of GroupLedger: every change of state, late results, checkpoints and the audit file."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from torchrl_rloo.collectors import ledger as ledger_module
from torchrl_rloo.collectors.ledger import GroupLedger, GroupState, Lease, check_audit
from torchrl_rloo.data import keys, load_prompts
from torchrl_rloo.envs.transforms import DataLoadingPrimer, DatasetExhaustedError
from torchrl_rloo.runtime import files

STATES = ("drawn", "leased", "complete", "delivered")


def make_ledger(epochs: int | None = None, audit: Path | None = None, first: int = 0) -> GroupLedger:
    prompts = load_prompts([{"prompt": f"{i}?"} for i in range(4)])
    primer = DataLoadingPrimer(prompts, num_generations=2, shuffle=False, epochs=epochs, first_group_id=first)
    return GroupLedger(primer, audit=audit)


def rows_of(lease: Lease) -> list[TensorDictBase]:
    return list(lease.rows.unbind(0))


def states(ledger: GroupLedger) -> dict[int, str]:
    return {group_id: group.state.value for group_id, group in ledger.groups.items()}


def finish(ledger: GroupLedger, count: int, *, acknowledge: bool = True) -> list[int]:
    """Take groups through all states, and return their ids."""
    ids = []
    for lease in ledger.lease(count):
        assert ledger.complete(lease.group_id, lease.attempt, rows_of(lease))
        ids.append(lease.group_id)
    ledger.deliver(ids)
    ledger.settle(ids)
    if acknowledge:
        ledger.acknowledge()
    return ids


def in_state(state: str) -> tuple[GroupLedger, int, int]:
    """Return a ledger with one group in a state, the group and its attempt."""
    ledger = make_ledger()
    (lease,) = ledger.lease(1)
    group, attempt = lease.group_id, lease.attempt
    if state == "drawn":
        ledger.requeue([group])
        attempt += 1
    if state in ("complete", "delivered"):
        ledger.complete(group, attempt, rows_of(lease))
    if state == "delivered":
        ledger.deliver([group])
    assert states(ledger) == {group: state}
    return ledger, group, attempt


# Changes of state


@pytest.mark.parametrize("state", STATES)
def test_every_change_of_state_is_allowed_or_refused(state: str) -> None:
    changes: dict[str, tuple[set[str], Callable]] = {
        "requeue": ({"leased", "complete"}, lambda ledger, group: ledger.requeue([group])),
        "drop": ({"drawn", "leased", "complete"}, lambda ledger, group: ledger.drop([group])),
        "deliver": ({"complete"}, lambda ledger, group: ledger.deliver([group])),
    }
    for name, (allowed, change) in changes.items():
        ledger, group, _ = in_state(state)
        if state in allowed:
            change(ledger, group)
            expected = {"requeue": {group: "drawn"}, "drop": {}, "deliver": {group: "delivered"}}[name]
            assert states(ledger) == expected
        else:
            with pytest.raises(ValueError, match=f"group_id={group} is {state}, so it cannot become"):
                change(ledger, group)
            assert states(ledger) == {group: state}, "left as it was"
    # A result counts for a leased group only; an acknowledgement for a taken one
    ledger, group, attempt = in_state(state)
    assert ledger.complete(group, attempt, []) == (state == "leased")
    assert ledger.counts["ledger/late"] == (state != "leased")
    ledger, group, _ = in_state(state)
    with pytest.raises(KeyError, match=f"group_id={group} is not delivered"):
        ledger.acknowledge([group])
    assert ledger.acknowledge() == 0 and states(ledger) == {group: state}


def test_a_group_passes_through_all_states() -> None:
    ledger = make_ledger()
    one, two = ledger.lease(2)
    assert (one.group_id, one.attempt, len(one.rows)) == (0, 0, 2)
    assert one.rows[keys.GROUP_ID].tolist() == [0, 0] and states(ledger) == {0: "leased", 1: "leased"}
    for version in (3, 2, 5):
        ledger.begin(0, 0, version)
    assert ledger.groups[0].version == 2, "the oldest"
    assert ledger.complete(0, 0, rows_of(one)) and ledger.complete(1, 0, rows_of(two))
    delivered = ledger.deliver([0, 1])
    assert [int(row[keys.GROUP_ID]) for row in delivered] == [0, 0, 1, 1]
    ledger.settle([0], reclaim=False)
    assert states(ledger) == {0: "delivered", 1: "delivered"} and ledger.groups[0].rows is None
    ledger.settle([0])
    assert states(ledger) == {0: "delivered", 1: "complete"} and len(ledger.deliver([1])) == 2
    ledger.settle([1])
    assert ledger.acknowledge([0, 0]) == 1 and ledger.acknowledge() == 1 and not ledger.groups
    assert ledger.of(*GroupState) == []
    assert ledger.counts == {"ledger/drawn": 2, "ledger/acknowledged": 2}


def test_late_results_are_dropped_by_attempt() -> None:
    ledger = make_ledger()
    (first,) = ledger.lease(1)
    ledger.begin(0, 0, 1)
    ledger.requeue([0])
    assert ledger.groups[0].version is None
    (second,) = ledger.lease(1)
    assert (second.group_id, second.attempt) == (0, 1), "drawn again under its id"
    assert second.rows[keys.PROMPT_ID].tolist() == first.rows[keys.PROMPT_ID].tolist()
    ledger.begin(0, 0, 1)
    assert ledger.groups[0].version is None, "the begin of an earlier attempt"
    assert not ledger.complete(0, 0, rows_of(first)) and ledger.groups[0].rows is None
    assert ledger.complete(0, 1, rows_of(second)) and not ledger.complete(0, 1, rows_of(second))
    ledger.drop([0])
    assert not ledger.complete(0, 1, rows_of(second)) and ledger.counts["ledger/late"] == 3


def test_requeued_groups_come_before_new_draws() -> None:
    ledger = make_ledger(epochs=1)
    ledger.lease(3)
    ledger.requeue([2, 0])
    assert [(lease.group_id, lease.attempt) for lease in ledger.lease(3)] == [(0, 1), (2, 1), (3, 0)]
    with pytest.raises(DatasetExhaustedError):
        ledger.lease(1)
    assert len(ledger.of(GroupState.LEASED)) == 4


# Failures on the way to a lease


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError], ids=lambda e: e.__name__)
@pytest.mark.parametrize("where", ["after the draw", "in the dataset", "in a later row"])
def test_a_failing_draw_loses_no_group(where: str, error: type[BaseException], monkeypatch) -> None:
    ledger = make_ledger(epochs=1)
    finish(ledger, 1)
    ledger.lease(1)
    ledger.requeue([1])
    failing = []

    def fail_once(function: Callable, at: Callable[..., bool], first: bool) -> Callable:
        def call(*args):
            result = None if first else function(*args)
            if not failing and at(*args):
                failing.append(1)
                raise error("once")
            return function(*args) if first else result

        return call

    primer = ledger.primer
    if where == "after the draw":
        monkeypatch.setattr(primer, "draw_ids", fail_once(primer.draw_ids, lambda n: True, False))
    elif where == "in the dataset":
        monkeypatch.setattr(
            type(primer.dataset), "__getitem__", fail_once(type(primer.dataset).__getitem__, lambda d, i: i == 3, True)
        )
    else:
        monkeypatch.setattr(primer, "make_group", fail_once(primer.make_group, lambda p, g: g == 2, True))
    with pytest.raises(error, match="once"):
        ledger.lease(3)
    assert set(states(ledger).values()) == {"drawn"}, "no group is leased without a caller"
    assert [lease.group_id for lease in ledger.lease(3)] == [1, 2, 3] and primer.remaining() == 0


# Checkpoints


def test_a_state_draws_all_open_groups_again() -> None:
    """At any time, groups that were not acknowledged come first, under the same ids and a later attempt."""
    ledger = make_ledger(epochs=2)
    finish(ledger, 1)  # 0
    finish(ledger, 1, acknowledge=False)  # 1: taken
    leases = ledger.lease(4)  # 2 to 5
    for lease in leases[:2]:
        ledger.complete(lease.group_id, lease.attempt, rows_of(lease))
    ledger.deliver([2])
    ledger.requeue([4])
    ledger.drop([5])
    assert states(ledger) == {1: "delivered", 2: "delivered", 3: "complete", 4: "drawn"}
    state = json.loads(json.dumps(ledger.state_dict(lambda: _plain(ledger.primer))))
    assert states(ledger) == {1: "delivered", 2: "delivered", 3: "complete", 4: "drawn"}, "left as it was"
    assert [lease.group_id for lease in ledger.lease(2)] == [4, 6], "the primer, too"

    other = make_ledger(epochs=2)
    finish(other, 3)
    other.load_state_dict(_with_ints(state), lambda env: _load_plain(other.primer, env))
    assert not other.groups and other.counts["ledger/acknowledged"] == 1
    again = other.state_dict(lambda: _plain(other.primer))
    assert again["attempts"] == {1: 1, 2: 1, 3: 1, 4: 2}, "a state of a state has the same groups"
    leases = other.lease(5)
    assert [(lease.group_id, lease.attempt) for lease in leases] == [(1, 1), (2, 1), (3, 1), (4, 2), (6, 0)]
    prompts = [int(lease.rows[0][keys.PROMPT_ID]) for lease in leases]
    assert prompts == [1, 2, 3, 0, 2]


def _plain(primer: DataLoadingPrimer) -> dict:
    state = primer.get_extra_state()
    return state | {"epoch_start": state["epoch_start"].tolist()}


def _load_plain(primer: DataLoadingPrimer, state: dict) -> None:
    primer.set_extra_state(state | {"epoch_start": torch.tensor(state["epoch_start"], dtype=torch.uint8)})


def _with_ints(state: dict) -> dict:
    return state | {"attempts": {int(group): attempt for group, attempt in state["attempts"].items()}}


# Audit file


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """Audit of two processes: the first is stopped after its checkpoint, with groups in every state."""
    path = tmp_path / "runs" / "audit.jsonl"
    one = make_ledger(audit=path, first=10)
    finish(one, 2)  # 10 and 11
    leases = one.lease(3)  # 12 to 14
    one.complete(12, 0, rows_of(leases[0]))
    one.requeue([13])
    state = one.state_dict(one.primer.get_extra_state)
    one.deliver([12])
    one.settle([12])
    one.acknowledge()  # after the checkpoint, so it runs again
    one.lease(1)
    two = make_ledger(audit=path, first=10)
    two.load_state_dict(state, two.primer.set_extra_state)
    finish(two, 2)  # 12 and 13
    two.lease(2)  # 14 and 15
    two.drop([15])
    finish(two, 1)  # 16
    return path


def test_a_real_history_is_accepted(history: Path) -> None:
    audit = check_audit(history)
    assert audit.acknowledged == {10, 11, 12, 13, 15, 16} and audit.open == {14}
    assert audit.attempts == 11 and audit.restores == 1
    lines = history.read_text().splitlines()
    restored = next(i for i, line in enumerate(lines) if "restored" in line)
    history.write_text("\n".join(lines[: restored + 1]))
    assert check_audit(history).open == {12, 13, 14}, "groups that wait after a restore are not lost"
    assert {"time", "state", "group", "attempt", "version"} == set(json.loads(lines[1]))


def test_a_run_that_starts_over_repeats_its_groups(tmp_path: Path) -> None:
    """Without a checkpoint the next process draws the same groups again, which is no second acknowledgement."""
    path = tmp_path / "audit.jsonl"
    finish(make_ledger(audit=path), 2)
    finish(make_ledger(audit=path), 3)
    audit = check_audit(path)
    assert audit.acknowledged == {0, 1, 2} and audit.attempts == 5 and audit.restores == 0


def test_doctored_histories_are_rejected(history: Path) -> None:
    records = [json.loads(line) for line in history.read_text().splitlines()]

    def position(state: str, group: int, last: bool = False) -> int:
        found = [i for i, r in enumerate(records) if r["state"] == state and r.get("group") == group]
        return found[-1 if last else 0]

    def check(doctored: list[dict], message: str) -> None:
        history.write_text("\n".join(map(json.dumps, doctored)))
        with pytest.raises(ValueError, match=message):
            check_audit(history)

    def without(*positions: int) -> list[dict]:
        return [record for i, record in enumerate(records) if i not in positions]

    restored = next(i for i, record in enumerate(records) if record["state"] == "restored")
    acknowledged, leased = position("acknowledged", 10), position("leased", 12)
    check(without(leased), "line .*: group 12 is complete after drawn")
    doubled = [*records[: acknowledged + 1], records[acknowledged], *records[acknowledged + 1 :]]
    check(doubled, f"line {acknowledged + 2}: group 10 is acknowledged again")
    check([*records, records[position("acknowledged", 13, last=True)]], "group 13 is acknowledged again")
    check(without(*(i for i, r in enumerate(records) if r.get("group") == 11)), "group 12 is drawn after group 10")
    lost = [dict(record) for record in records]
    lost[restored]["requeued"] = [12, 13]
    check(lost, r"the checkpoint lost groups \[14\]")
    late = [dict(record) for record in records]
    late[position("complete", 13)]["attempt"] = 0
    check(late, "attempt 0 of group 13 is complete, but was not drawn")
    again = next(i for i, r in enumerate(records) if r["state"] == "drawn" and r["group"] == 13 and r["attempt"] == 1)
    stuck = [dict(record) for record in records]
    stuck[again]["attempt"] = 0
    check(stuck, "group 13 is drawn again under attempt 0")


class Disk:
    """Writer of lines that fails at some writes, counted from 1, and leaves half a line."""

    def __init__(self, fails: Callable[[int], bool]):
        self.fails, self.writes, self.append = fails, 0, files.append

    def __call__(self, path: Path, content: bytes) -> None:
        self.writes += 1
        if self.fails(self.writes):
            self.append(path, content[: len(content) // 2])
            raise OSError("the disk is full")
        self.append(path, content)


def written(call: Callable[[], Any]) -> Any:
    """Repeat a call until the disk has room."""
    while True:
        with suppress(OSError):
            return call()


def pass_through_all_states(ledger: GroupLedger) -> None:
    """Draw, lease, complete, requeue, drop, deliver, reclaim, acknowledge and restore groups, several at a time."""
    finish(ledger, 2)
    ids = [lease.group_id for lease in ledger.lease(4)]
    for group in ids[:3]:
        ledger.complete(group, 0, [])
    ledger.requeue([ids[0], ids[3]])
    ledger.deliver(ids[1:3])
    ledger.settle(ids[1:2])
    state = written(lambda: ledger.state_dict(ledger.primer.get_extra_state))
    ledger.acknowledge()
    ledger.drop(ids[3:])
    ledger.load_state_dict(state, ledger.primer.set_extra_state)
    finish(ledger, 5)


@pytest.mark.parametrize("length", [1, 5])
def test_a_failed_write_changes_no_state_and_loses_no_line(length: int, tmp_path: Path, monkeypatch) -> None:
    """Each write of the file fails once, alone and with those after it."""
    pass_through_all_states(expected := make_ledger(audit=tmp_path / "expected.jsonl"))
    complete, lines = check_audit(tmp_path / "expected.jsonl"), (tmp_path / "expected.jsonl").read_text().count("\n")
    assert complete.restores == 1 and len(complete.acknowledged) == 7 and lines > 40
    for first in range(2, lines + 1):
        ledger = make_ledger(audit=tmp_path / f"{first}.jsonl")
        monkeypatch.setattr(ledger_module, "append", Disk(lambda n, first=first: first <= n + 1 < first + length))
        pass_through_all_states(ledger)
        written(ledger.flush)
        assert check_audit(tmp_path / f"{first}.jsonl") == complete and ledger.counts == expected.counts
        assert states(ledger) == states(expected)
        monkeypatch.undo()


def test_an_audit_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch, caplog) -> None:
    ledger = make_ledger(audit=tmp_path / "audit.jsonl")
    monkeypatch.setattr(ledger_module, "append", Disk(lambda number: True))
    finish(ledger, 2)
    for call in (ledger.flush, lambda: ledger.state_dict(dict), lambda: make_ledger(audit=tmp_path / "other.jsonl")):
        with pytest.raises(OSError, match="the disk is full"):
            call()
    ledger.close()
    assert "the last 10 lines of the audit are lost: the disk is full" in caplog.text


def test_counts_of_states_agree_with_the_groups() -> None:
    """Take groups through random changes and a restore; the counts by state equal those of a pass over all groups."""
    ledger, draw = make_ledger(), random.Random(0)
    saved = None
    for number in range(300):
        by_state = {state: ledger.of(state) for state in GroupState}
        leased, complete = by_state[GroupState.LEASED], by_state[GroupState.COMPLETE]
        for lease in ledger.lease(draw.randint(1, 3)):
            if draw.random() < 0.7:
                ledger.complete(lease.group_id, lease.attempt, rows_of(lease))
        ledger.requeue([g.group_id for g in (*leased, *complete) if draw.random() < 0.1])
        ledger.drop([g.group_id for g in ledger.of(GroupState.LEASED) if draw.random() < 0.1])
        ids = [g.group_id for g in ledger.of(GroupState.COMPLETE) if draw.random() < 0.5]
        ledger.deliver(ids)
        ledger.settle(ids[::2])
        ledger.acknowledge()
        if number == 150:
            saved = ledger.state_dict(ledger.primer.state_dict)
        if number == 200:
            ledger.load_state_dict(saved, ledger.primer.load_state_dict)
        for state in GroupState:
            assert ledger.count(state) == len(ledger.of(state)), (number, state)
    assert ledger.count(*GroupState) == len(ledger.groups) > 0
