"""CallTree: the calls of one agent's session, joined token by token into the samples of a trajectory.

An agent sends its whole conversation with every call. A call continues an earlier one if its messages begin with those
of that call and its reply. Its prompt is then the ids of the earlier call, followed by the ids of what is new. Sampled
text is never encoded again. A call whose past was rewritten (compaction, another agent, removed turns) begins a new
sample.

Calls form a tree: each path from a root to a leaf is one sample. An action token is trained on in the first sample that
has it, and is context in the others.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import Messages, answer_turn, encode_prompt, image_paths
from torchrl_rloo.envs.tools.parsers import without_thinking
from torchrl_rloo.functional.sampling import Support
from torchrl_rloo.images.encoder import digests
from torchrl_rloo.images.store import digest_of

MessageKey = tuple[Any, ...]


class Sampled(NamedTuple):
    """Tokens that a call sampled, or those of a whole sample."""

    tokens: torch.Tensor  # [n] int64
    mask: torch.Tensor  # [n] bool, True on action tokens
    log_probs: torch.Tensor  # [n] float32, 0 on other tokens
    versions: torch.Tensor | None = None  # [a] int64, policy version of each action token
    support: Support | None = None  # ids that the sampler's truncation kept for each action token
    images: torch.Tensor | None = None  # [n, 32] uint8, SHA-256 of each image in order; None without any


@dataclass(eq=False)
class Prompt:
    """Prompt of a call."""

    conversation: Messages  # with the policy's own text in the policy's turns
    keys: tuple[MessageKey, ...]  # of the messages as the agent sent them
    arguments: Mapping[str, Any]  # of the chat template
    parent: Call | None  # that it continues; None if it begins a sample
    new: list[int]  # ids after the parent's, or all ids
    images: list[str] = field(default_factory=list)  # paths of those of the new ids
    repeats: int = 0  # earlier calls with the same prompt

    @property
    def path(self) -> list[Call]:
        """Calls before this one, from the first."""
        return [] if self.parent is None else [*self.parent.prompt.path, self.parent]

    @property
    def context(self) -> Sampled:
        """Tokens before the reply."""
        return join(self.path, self.new, images=self.images)

    def __len__(self) -> int:
        return len(self.new) + (0 if self.parent is None else len(self.parent))


@dataclass(eq=False)
class Call:
    """Finished call."""

    prompt: Prompt
    sampled: Sampled
    text: str  # everything that the policy wrote
    reply: Mapping[str, Any]  # message that the agent received
    truncated: bool  # whether a limit ended it
    deliveries: int = 0  # connections over which the agent received the reply
    continued: bool = False  # whether the agent sent the reply back, so that it must have received it
    names: set[str] = field(default_factory=set)  # ids of the responses with this reply, without their prefix

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled.tokens)

    @property
    def delivered(self) -> bool:
        """True if the agent received the reply."""
        return self.continued or self.deliveries > 0

    @property
    def conversation(self) -> Messages:
        """Messages up to the reply, with the policy's own text."""
        return [*self.prompt.conversation, {"role": "assistant", "content": self.text}]


class CallTree:
    """Calls of one session."""

    def __init__(self, tokenizer: Any, *, end_ids: Collection[int] = (), on_rewrite: Literal["keep", "split"] = "keep"):
        self.tokenizer, self.end_ids, self.on_rewrite = tokenizer, end_ids, on_rewrite
        self.calls: list[Call] = []
        self.counts: Counter[str] = Counter()
        self._ends: dict[tuple[MessageKey, ...], list[Call]] = {}  # calls by their messages and their reply
        self._seen: dict[tuple[Any, ...], set[int]] = {}  # numbers of the calls with a prompt

    def prompt(self, messages: Messages, arguments: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a call."""
        named = tuple(map(message_key, messages))
        prompt = self._continued(messages, named, arguments)
        if prompt is None:
            prompt = self._first(messages, named, arguments)
        taken = self._seen.setdefault(_place(prompt), set())
        prompt.repeats = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(prompt.repeats)
        return prompt

    def _first(self, messages: Messages, named: tuple[MessageKey, ...], arguments: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a call that begins a sample."""
        ids = encode_prompt(self.tokenizer, messages, **arguments)
        return Prompt(messages, named, arguments, None, ids, image_paths(messages))

    def release(self, prompt: Prompt) -> None:
        """Forget the prompt of a call without a reply; a repetition then gets its random numbers."""
        self._seen[_place(prompt)].discard(prompt.repeats)

    def _continued(
        self, messages: Messages, named: tuple[MessageKey, ...], arguments: Mapping[str, Any]
    ) -> Prompt | None:
        """Return the prompt that continues the call with the most of its messages; None if it continues none."""
        parent = None
        for count in range(len(named) - 1, 0, -1):
            if named[count - 1][0] == "assistant" and (ended := self._ends.get(named[:count])):
                # Equal replies: the agent continues one that it received
                parent = next((call for call in reversed(ended) if call.delivered), ended[-1])
                break
        if parent is None:
            return None
        conversation, feedback = parent.conversation, messages[count:]
        try:
            new, rewritten = answer_turn(
                self.tokenizer,
                conversation,
                feedback,
                last_token=int(parent.sampled.tokens[-1]),
                end_ids=self.end_ids,
                seen_arguments=parent.prompt.arguments,
                **arguments,
            )
        except ValueError:  # the template shows these messages only as a whole
            return None
        parent.continued = True
        whole = [*conversation, *feedback]
        self.counts["agent/rewritten"] += rewritten
        if rewritten and self.on_rewrite == "split":
            return self._first(whole, named, arguments)
        return Prompt(whole, named, arguments, parent, new, image_paths(feedback))

    def add(self, call: Call) -> Call:
        """Add a finished call."""
        self.calls.append(call)
        self._ends.setdefault((*call.prompt.keys, message_key(call.reply)), []).append(call)
        self.counts["agent/new_samples"] += call.prompt.parent is None
        return call

    def leaves(self) -> list[Call]:
        """Return the last calls of all samples, without orphans."""
        delivered = [call for call in self.calls if call.delivered]
        continued = {id(call.prompt.parent) for call in delivered}
        return [call for call in delivered if id(call) not in continued]

    def orphans(self) -> int:
        """Return the number of replies that the agent did not receive."""
        return sum(not call.delivered for call in self.calls)

    def samples(self) -> list[Sampled]:
        """Return the samples of the trajectory, in the order of their last calls."""
        covered: set[int] = set()
        samples = []
        for leaf in self.leaves():
            path = [*leaf.prompt.path, leaf]
            samples.append(join(path, trained=[id(call) not in covered for call in path]))
            covered.update(map(id, path))
        return samples


def _place(prompt: Prompt) -> tuple[Any, ...]:
    return (id(prompt.parent) if prompt.parent is not None else None, *prompt.new)


def join(
    path: Sequence[Call], new: Sequence[int] = (), trained: Sequence[bool] | None = None, images: Sequence[str] = ()
) -> Sampled:
    """Join the calls of a path to one sequence of tokens."""
    trained = [True] * len(path) if trained is None else trained
    tokens, masks, log_probs = [], [], []
    for call, is_action in zip(path, trained, strict=True):
        n = len(call.prompt.new)
        sampled = call.sampled
        tokens += [torch.tensor(call.prompt.new, dtype=torch.long), sampled.tokens]
        masks += [torch.zeros(n, dtype=torch.bool), torch.full((len(sampled.tokens),), is_action)]
        log_probs += [torch.zeros(n), sampled.log_probs if is_action else torch.zeros(len(sampled.tokens))]
    tokens.append(torch.tensor(new, dtype=torch.long))
    masks.append(torch.zeros(len(new), dtype=torch.bool))
    log_probs.append(torch.zeros(len(new)))
    kept = [call.sampled for call, is_action in zip(path, trained, strict=True) if is_action]
    versions = support = None
    if kept and all(sampled.versions is not None for sampled in kept):
        versions = torch.cat([sampled.versions for sampled in kept])
    if kept and all(sampled.support is not None for sampled in kept):
        support = Support(*(torch.cat(parts) for parts in zip(*(sampled.support for sampled in kept), strict=True)))
    paths = [*(image for call in path for image in call.prompt.images), *images]
    shown = digests(paths) if paths else None
    return Sampled(torch.cat(tokens), torch.cat(masks), torch.cat(log_probs), versions, support, shown)


def rewarded_calls(calls: Sequence[Call], rewards: Mapping[str, float]) -> list[tuple[Call, float]]:
    """Return the calls that have a reward, with it."""
    named = {name: call for call in calls for name in call.names}
    found = []
    for name, value in rewards.items():
        if (call := named.get(re.split("[-_]", name, maxsplit=1)[-1])) is None:
            raise ValueError(f"call_rewards has {name[:100]!r}, which is the id of no response of this conversation")
        found.append((call, value))
    return found


def read_sample(row: TensorDictBase, prompt_length: int) -> Sampled:
    """Return the tokens that a policy sampled on a row, after a prompt of ``prompt_length`` tokens."""
    tokens, log_probs = row[keys.TOKENS][prompt_length:], row[keys.LOG_PROBS][prompt_length:]
    versions, support = row.get(keys.ACTION_VERSIONS, None), row.get(keys.SUPPORT_IDS[0], None)
    n = len(tokens)
    if versions is not None:
        versions = versions[len(versions) - n :]
    if support is not None:
        sizes = support["sizes"][len(support["sizes"]) - n :]
        total = int(sizes.sum())
        support = Support(support["ids"][len(support["ids"]) - total :], sizes)
    return Sampled(tokens, torch.ones(n, dtype=torch.bool), log_probs, versions, support)


def write_sample(row: TensorDictBase, sample: Sampled) -> TensorDictBase:
    """Set what a row has of a sample other than ids, mask and log-probs, in place."""
    if sample.images is not None:
        row.set(keys.IMAGES, sample.images)
    elif (images := row.get(keys.IMAGES, None)) is not None:  # of the conversation's query
        row.set(keys.IMAGES, images[:0])
    if sample.versions is not None:
        row.set(keys.ACTION_VERSIONS, sample.versions)
    if sample.support is not None:
        row.set(keys.SUPPORT_IDS[0], TensorDict(dict(zip(("ids", "sizes"), sample.support, strict=True)), []))
    return row


def message_key(message: Mapping[str, Any]) -> MessageKey:
    """Return what a message says, without what clients change: white space, thinking, ids and spelling of calls."""
    role, content = message["role"], message.get("content") or ""
    role = "system" if role == "developer" else role
    calls = tuple(map(_call_key, message.get("tool_calls") or ()))
    if isinstance(content, list):
        parts = (digest_of(part["url"]) if part["type"] == "image" else part["text"].strip() for part in content)
        return role, tuple(parts), calls
    if role == "assistant":
        content = without_thinking(content)
    return role, content.strip(), calls


def _call_key(call: Mapping[str, Any]) -> tuple[str, str]:
    function = call["function"]
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            return function["name"], arguments
    return function["name"], json.dumps(arguments, sort_keys=True)
