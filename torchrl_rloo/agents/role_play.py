"""RolePlay: several roles in one conversation, each with its own rows and groups."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from tensordict import TensorDictBase

from torchrl_rloo.agents.agents import AgentContext
from torchrl_rloo.agents.policy_endpoint import OpenConversation, PolicyEndpoint
from torchrl_rloo.agents.session import derive_seed
from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages


class RoleConversation:
    """Conversation of a :class:`RolePlay`.

    Attributes:
        contexts: address and key of each role.
    """

    def __init__(self, conversations: Mapping[str, OpenConversation], frozen: Collection[str]):
        self._conversations, self._frozen = dict(conversations), frozenset(frozen)
        self.contexts: dict[str, AgentContext] = {role: c.context for role, c in conversations.items()}

    def finish(self, rewards: Mapping[str, float]) -> dict[str, TensorDictBase]:
        """End the conversation of all roles; their keys are refused from now on.

        Args:
            rewards: return of each role that is not frozen; NaN lets its row abstain.

        Returns:
            Finished row of each role that is not frozen. The row of a role that never called has no action tokens
            and abstains, so that its group is complete.

        Raises:
            ValueError: if ``rewards`` has other roles, or an infinite reward. The conversation stays open.
            RuntimeError: if the policy failed on a call of any role. The conversation has ended.
        """
        trained = self._conversations.keys() - self._frozen
        if rewards.keys() != trained:
            raise ValueError(f"rewards={dict(rewards)} must have exactly the trained roles {sorted(trained)}")
        if any(math.isinf(reward) for reward in rewards.values()):
            raise ValueError(f"rewards={dict(rewards)} must be finite, or NaN to abstain")
        rows, errors = {}, []
        for role, conversation in self._conversations.items():
            called = bool(conversation.session.tree.leaves())
            try:  # End all roles, also if one of them failed
                row = conversation.finish(float(rewards.get(role, 0.0)) if called else math.nan)
            except RuntimeError as error:
                errors.append(error)
                continue
            if role not in self._frozen:
                rows[role] = row
        if errors:
            raise errors[0]
        return rows


class RolePlay:
    """Conversations of several roles, such as two players, or a proposer and a solver, over policy endpoints.

    Each role has its own key, and its calls join into its own row. The row has the ordinary schema and ``"role"``, the
    role's name. Its ``"group_id"`` is ``group_id * n_roles + i`` for the role of index ``i``. The baseline of
    :class:`~torchrl_rloo.replay.MCAdvantage` is therefore within a group and a role. It needs ``num_generations``. All
    rows of a buffer must come from conversations of the same roles.

    Args:
        endpoints: endpoint of each role. Roles of one policy share an endpoint; a role with weights or an adapter of
            its own has another.
        frozen: roles whose rows are not returned, such as a fixed opponent or a judge.

    Raises:
        ValueError: if there is no role to train, or ``frozen`` has an unknown role.

    Example::

        play = RolePlay({"white": endpoint, "black": endpoint})
        for _ in range(4):
            conversation = play.open({"white": rules, "black": rules}, group_id=0)
            winner = my_game(conversation.contexts["white"], conversation.contexts["black"])
            rows = conversation.finish({role: 1.0 if role == winner else -1.0 for role in play.endpoints})
    """

    def __init__(self, endpoints: Mapping[str, PolicyEndpoint], *, frozen: Collection[str] = ()):
        self.endpoints, self.frozen = dict(endpoints), frozenset([frozen] if isinstance(frozen, str) else frozen)
        if unknown := self.frozen - self.endpoints.keys():
            raise ValueError(f"frozen={sorted(unknown)} must be among the roles {list(self.endpoints)}")
        if self.frozen == self.endpoints.keys():
            raise ValueError(f"frozen={sorted(self.frozen)} leaves no role of {list(self.endpoints)} to train")

    def open(self, queries: Mapping[str, Messages], *, group_id: int, seed: int | None = None) -> RoleConversation:
        """Open a conversation.

        Args:
            queries: messages with which the first call of each role begins.
            group_id: number of the group, the same for conversations to compare.
            seed: seed of the samples of all roles, which differ by role; None draws one.

        Raises:
            ValueError: if ``queries`` has other roles, or one of them leaves the policy no token.
        """
        if queries.keys() != self.endpoints.keys():
            raise ValueError(f"queries={sorted(queries)} must have exactly the roles {sorted(self.endpoints)}")
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        conversations: dict[str, OpenConversation] = {}
        for i, (role, endpoint) in enumerate(self.endpoints.items()):
            columns = {keys.ROLE: role, keys.ROLE_ID: torch.tensor(i)}
            columns |= {keys.GROUP_ID: torch.tensor(group_id * len(self.endpoints) + i)}
            try:
                conversations[role] = endpoint.open(queries[role], seed=derive_seed(seed, role), **columns)
            except Exception:  # Withdraw the keys of the roles before it
                for opened in conversations.values():
                    opened.finish()
                raise
        return RoleConversation(conversations, self.frozen)
