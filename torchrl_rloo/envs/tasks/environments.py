"""Tasks whose conversations are those of an environment of another package."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.envs.tasks.base import EMBEDDED, Task
from torchrl_rloo.envs.text.adapters import ENV_SEED, EnvSession
from torchrl_rloo.envs.text.packages import Gymnasium, OpenEnv, TextArena
from torchrl_rloo.envs.text.transform import PLACEHOLDER_PROMPT, TextEnvTransform
from torchrl_rloo.runtime import event_loop
from torchrl_rloo.runtime.lookup import import_object, import_room

TRAIN_SIZE = 1024  # games to train on, unless data.limit says otherwise
_HELD_OUT_SEED = 2**30  # the seed of the first held-out game
_VERIFIERS = "torchrl_rloo.agents.verifiers"


@dataclass(frozen=True)
class EnvironmentTask(Task):
    """Games of an environment of another package, which opens and answers conversations, and rewards them.

    Rows have the columns ``environment``, the option ``named_by`` of :meth:`load`, ``arguments`` and ``env_seed``.
    """

    kind: type | None = None
    named_by: str = "name"
    takes_arguments = True

    def load(
        self,
        source: Any = None,
        *,
        name: str | None = None,
        arguments: dict[str, Any] | None = None,
        system_prompt: str | None = None,
        eval_size: int = 256,
        seed: int = 0,
        limit: int | None = None,
        **unused: Any,
    ) -> tuple[PromptDataset, PromptDataset]:
        """Return games to train on and held-out ones; ``unused`` has settings of datasets, which must be empty."""
        given = {"name": name, "source": None if source == EMBEDDED else source}
        if (environment := given.pop(self.named_by)) is None:
            raise ValueError(f"task={self.name} requires data.{self.named_by}: set it to an environment")
        for option, value in (given | unused).items():
            if value and option not in ("tokenizer", "template_kwargs"):
                raise ValueError(f"data.{option}={value!r} has no effect with task={self.name}; leave it null")
        system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        row = {keys.QUERY: [*system, *PLACEHOLDER_PROMPT], "environment": environment, "arguments": arguments or {}}
        try:
            return tuple(map(PromptDataset, self.make_rows(row, limit or TRAIN_SIZE, eval_size, seed)))
        except Exception as error:  # the package is missing, or knows no such environment or arguments
            kind = ImportError if isinstance(error, ImportError) else ValueError
            named = f"data.{self.named_by}={environment!r} with data.arguments={arguments or {}}"
            raise kind(f"task={self.name} cannot open {named}: {error}") from error

    def make_rows(self, row: dict[str, Any], size: int, eval_size: int, seed: int) -> tuple[list, list]:
        """Return rows of seeds, after one game was opened to see that it can be."""
        session = EnvSession(self.kind())
        try:
            event_loop.run(event_loop.call(session.reset, row | {ENV_SEED: _HELD_OUT_SEED}, timeout=60.0))
        finally:
            event_loop.run(session.close())
        blocks = ((seed * size, size), (_HELD_OUT_SEED, eval_size))
        return tuple([row | {ENV_SEED: first + i} for i in range(count)] for first, count in blocks)


class VerifiersTask(EnvironmentTask):
    """Tasks of a taskset of verifiers; its environment plays them with the policy at an endpoint."""

    def make_rows(self, row: dict[str, Any], size: int, eval_size: int, seed: int) -> tuple[list, list]:
        """Return the first tasks of the taskset, some of them held out at random."""
        rows = import_object(f"{_VERIFIERS}.load_rows", "task")(row, size + eval_size)
        if len(rows) <= eval_size:
            raise ValueError(f"data.eval_size={eval_size} must be below its number of tasks, {len(rows)}; lower it")
        held_out = set(random.Random(seed).sample(range(len(rows)), eval_size))
        return [row for i, row in enumerate(rows) if i not in held_out], [rows[i] for i in sorted(held_out)]


def _make(name: str, kind: type, named_by: str = "name") -> EnvironmentTask:
    def transforms() -> list[TextEnvTransform]:
        return [TextEnvTransform(lambda: EnvSession(kind()))]

    return EnvironmentTask(name, None, (), None, transforms=transforms, kind=kind, named_by=named_by)


GYMNASIUM, TEXTARENA = _make("gymnasium", Gymnasium), _make("textarena", TextArena)
OPENENV = _make("openenv", OpenEnv, named_by="source")
VERIFIERS = VerifiersTask(
    "verifiers",
    *(None, (), None),
    transforms=lambda: [import_room("agents", "task=verifiers").AgentTransform(f"{_VERIFIERS}.play")],
    limits={"max_turns": 64, "max_seconds": 600.0},
)
