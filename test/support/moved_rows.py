"""Conversations opened in one process and continued in another; a spawned process imports this module."""

from __future__ import annotations

import pickle
from multiprocessing.connection import Connection

import torch
from tensordict import TensorDict

from torchrl_rloo.data import keys
from torchrl_rloo.data.packed import unpack_rows
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.embedded import build_tokenizer
from torchrl_rloo.envs import ChatEnv

MAX_SECONDS = 1.5  # of a conversation


def open_conversations(groups: list[int] | None, ids: list[int] | None = None) -> list[TensorDict]:
    """Return the first rows of two conversations, of these groups and with these ids."""
    env = ChatEnv(build_tokenizer(), batch_size=2, max_seconds=MAX_SECONDS)
    rows = [TensorDict({keys.QUERY: "What is 2+3?"}, []) for _ in range(2)]
    for name, numbers in ((keys.GROUP_ID, groups), (keys.TRAJECTORY_ID, ids)):
        for row, number in zip(rows, numbers or (), strict=False):
            row.set(name, torch.tensor(number))
    return list(env.reset(stack_rows(rows)).unbind(0))


def serve(connection: Connection) -> None:
    """Report ids of conversations opened here, then the limits that received conversations have reached."""
    connection.send([[int(row[keys.TRAJECTORY_ID]) for row in open_conversations(groups)] for groups in (None, [5, 5])])
    env = ChatEnv(build_tokenizer(), max_seconds=MAX_SECONDS)
    while (message := connection.recv()) is not None:
        rows = unpack_rows(pickle.loads(message))
        connection.send([(int(row[keys.TRAJECTORY_ID]), env.limit_reached(row)) for row in rows.unbind(0)])
