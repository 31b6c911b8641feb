"""Conversations that continue in another process: their ids, and the time at which they began."""

from __future__ import annotations

import multiprocessing
import pickle
import time

from support.moved_rows import MAX_SECONDS, open_conversations, serve
from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import pack_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.trajectory_ids import TrajectoryIds, trajectory_id
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs import ChatEnv


def test_ids_and_times_hold_in_another_process() -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()
    random_there, of_group_there = here.recv()
    # Ids without a group differ between processes, those of a group are the same in each
    rows = open_conversations(None)
    ids = [int(row[keys.TRAJECTORY_ID]) for row in rows]
    assert len({*ids, *random_there}) == 4
    assert [int(row[keys.TRAJECTORY_ID]) for row in open_conversations([5, 5])] == of_group_there
    assert of_group_there == [trajectory_id(5, 0), trajectory_id(5, 1)]
    # The time of a conversation continues during its move
    message = pickle.dumps(pack_rows(stack_rows(rows)))
    here.send(message)
    assert [i for i, _ in here.recv()] == ids
    time.sleep(MAX_SECONDS)
    here.send(message)
    assert here.recv() == [(i, "time") for i in ids]
    here.send(None)
    process.join(30)


def test_a_drawn_row_keeps_its_id_and_a_new_conversation_gets_another() -> None:
    rows = open_conversations([5, 5], ids=[77, 2**62])
    assert [int(row[keys.TRAJECTORY_ID]) for row in rows] == [77, 2**62]
    again = ChatEnv(build_tokenizer(), batch_size=2).reset(stack_rows(rows))
    assert {int(row[keys.TRAJECTORY_ID]) for row in again.unbind(0)}.isdisjoint({77, 2**62})


def test_ids_are_int64_and_do_not_collide() -> None:
    ids = TrajectoryIds()
    made = [ids.next(group) for group in (None, *range(3000)) for _ in range(4)]
    assert len(set(made)) == len(made) and all(0 <= number < 2**63 for number in made)
