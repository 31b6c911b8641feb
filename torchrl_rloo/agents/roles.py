"""RoleSessions: the roles of one conversation, each with its own calls, and the row that they make."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from torchrl_rloo.agents.call_tree import rewarded_calls
from torchrl_rloo.agents.session import AgentSession, Sample, derive_seed
from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import copy_row, make_non_tensor
from torchrl_rloo.data.segments import Role
from torchrl_rloo.envs.chat import ChatEnv


class RoleSessions:
    """Sessions of the roles of one conversation, to be used like one :class:`AgentSession`.

    Limits hold for each role. The row has the samples of all roles that are trained, and ``ROLE_RECORD`` tells whose
    they are; :func:`~torchrl_rloo.data.segments.split_roles` makes one row of each role of it.
    """

    def __init__(self, env: ChatEnv, row: TensorDictBase, sample: Sample, *, roles: Sequence[Role], **settings: Any):
        self.roles, self.broken = roles, asyncio.Event()
        self.by_role: dict[str, AgentSession] = {}
        for i, role in enumerate(roles):
            own = copy_row(row)
            own.set(keys.ROLE_ID, torch.tensor(i))
            if (seed := row.get(keys.SEED, None)) is not None:
                own.set(keys.SEED, torch.tensor(derive_seed(int(seed), role.name)))
            session = self.by_role[role.name] = AgentSession(env, own, sample, **settings)
            session.broken = self.broken
        self._row = row

    @property
    def _trained(self) -> dict[str, AgentSession]:
        return {role.name: self.by_role[role.name] for role in self.roles if not role.frozen}

    @property
    def counts(self) -> Counter[str]:
        """Counters of all roles."""
        return sum((session.counts for session in self.by_role.values()), Counter())

    @property
    def error(self) -> Exception | None:
        """First error of the policy, by the order of roles."""
        return next((s.error for s in self.by_role.values() if s.error is not None), None)

    @property
    def limit(self) -> str | None:
        """Stop reason of the first limit that refused a call, by the order of roles."""
        return next((s.limit for s in self.by_role.values() if s.limit is not None), None)

    @property
    def called(self) -> bool:
        """True if a role that is trained received a reply."""
        return any(session.called for session in self._trained.values())

    def end(self) -> None:
        """Cancel the calls in flight, and refuse others."""
        for session in self.by_role.values():
            session.end()

    def last_stop_reason(self) -> str:
        """Return ``"ended"``, or the stop reason of the first role whose last reply was cut."""
        reasons = [session.last_stop_reason() for session in self._trained.values() if session.called]
        return next((reason for reason in reasons if reason != "ended"), "ended")

    def transcript(self) -> list[dict[str, Any]]:
        """Return the calls of one role after the other, each as of :class:`AgentSession`, with its ``"role"``."""
        return [{"role": role, **call} for role, session in self.by_role.items() for call in session.transcript()]

    def finish(
        self,
        reason: str,
        reward: float = 0.0,
        call_rewards: Mapping[str, float] | None = None,
        role_rewards: Mapping[str, float] | None = None,
    ) -> TensorDictBase:
        """Return the conversation's row with its outcome in ``"next"``."""
        trained = self._trained
        calls = [call for session in trained.values() for call in session.tree.calls]
        rewarded = {id(call): 0.0 for call in calls}
        for call, value in rewarded_calls(calls, call_rewards or {}):
            rewarded[id(call)] += value
        samples, record = [], []
        for role in self.roles:
            session = self.by_role[role.name]
            session.count_tree()
            if role.frozen:
                continue
            samples += session.tree.samples()
            own = reason if reason in ("failed", "time") else session.limit
            credited: set[int] = set()
            for leaf in session.tree.leaves():
                path = [id(call) for call in (*leaf.prompt.path, leaf)]
                new = [call for call in path if call not in credited]
                credited.update(path)
                # A sample earns what its calls did, also those that it shares; the row of a role counts each call once
                earning = path if role.compare == "conversation" else new
                record.append(
                    {
                        "role": role.name,
                        "reward": sum(rewarded[call] for call in earning),
                        "turns": len(new),
                        "completion": session.completion(leaf),
                        "reason": own or session.last_stop_reason(),
                    }
                )
        n_calls = sum(len(session.tree.calls) for session in self.by_role.values())
        row = next(iter(trained.values())).make_row(samples, reason, reward, n_calls)
        row["next"].set(keys.COMPLETION, make_non_tensor(record[-1]["completion"] if record else []))
        row["next"].set(keys.ROLE_RECORD[1], make_non_tensor({"samples": record, "rewards": dict(role_rewards or {})}))
        versions = [s.version for s in trained.values() if s.version is not None]
        if versions:
            row.set(keys.POLICY_VERSION, min(versions))
        if (seed := self._row.get(keys.SEED, None)) is not None:
            row.set(keys.SEED, seed)
        return row
