"""Environments of other packages, with text as observation and action, in the style of Gymnasium.

``reset`` makes the environment from its options: ``environment``, a name or address, and ``arguments``.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import contextmanager
from importlib import import_module
from threading import Lock
from typing import Any

from torchrl_rloo.runtime.event_loop import call
from torchrl_rloo.runtime.lookup import import_object

_COLORED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")  # a drawing marks the player's place so
_NUMBER = re.compile(r"-?[0-9]{1,9}")
_BRACKETED = re.compile(r"\[[^][\n]+\]")
_RANDOM = Lock()


def import_package(name: str, extra: str) -> Any:
    """Import a module; ``ImportError`` names the extra that installs its package."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(f"task={extra} requires {extra}: pip install 'torchrl_rloo[{extra}]'") from error


class Gymnasium:
    """Environment of Gymnasium in which the last number of a turn, or its text, is the action.

    With the argument ``render_mode="ansi"``, observations begin with what ``render`` draws. A turn without a possible
    action is answered with what to write, and takes no step.
    """

    env = None

    def reset(self, *, seed: int, options: dict[str, Any]) -> tuple[str, dict]:
        """Make the environment and open it."""
        self.env = import_package("gymnasium", "gymnasium").make(options["environment"], **options["arguments"])
        self.space = self.env.action_space
        if (kind := type(self.space).__name__) not in ("Discrete", "Text"):
            raise ValueError(f"its actions are {kind}, not numbers (Discrete) or Text; use text_env(..., action=)")
        first = 0 if kind == "Text" else self.space.start
        self.hint = "" if kind == "Text" else f"Answer with a number from {first} to {first + self.space.n - 1}."
        observation, info = self.env.reset(seed=seed)
        return f"{self._show(observation)}\n{self.hint}".strip(), info

    def step(self, text: str) -> tuple[str, Any, bool, bool, dict]:
        """Step the environment."""
        numbers = _NUMBER.findall(text)
        action = int(numbers[-1]) if self.hint and numbers else text
        if not self.space.contains(action):
            return self.hint or "Answer with other text.", 0.0, False, False, {}
        observation, *rest = self.env.step(action)
        return self._show(observation), *rest

    def _show(self, observation: Any) -> str:
        drawn = _COLORED.sub(r"[\1]", self.env.render()) if self.env.render_mode == "ansi" else ""
        return f"{drawn}\n{observation}".strip()

    def close(self) -> None:
        """Close the environment, if it was made."""
        if self.env is not None:
            self.env.close()


class OpenEnv:
    """Environment on a server of OpenEnv, whose address is its name.

    Arguments ``action`` and ``observation`` name the field that the policy writes or reads; without them it writes or
    reads all fields as JSON. The others go to the server's ``reset``. An action that the server rejects takes no step.
    """

    client = None

    async def reset(self, *, seed: int, options: dict[str, Any]) -> str:
        """Connect to the server and open an environment."""
        arguments = {"action": None, "observation": None, "seed": seed} | options["arguments"]
        self.field, self.shown = arguments.pop("action"), arguments.pop("observation")
        package = await call(import_package, "openenv.core", "openenv")
        self.client = package.GenericEnvClient(base_url=options["environment"])
        return self._show((await self.client.reset(**arguments)).observation)

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        """Step the environment."""
        try:
            result = await self.client.step(json.loads(text) if self.field is None else {self.field: text})
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            return f"This is no action: {error}", 0.0, False
        return self._show(result.observation), result.reward, result.done

    def _show(self, observation: dict[str, Any]) -> str:
        return json.dumps(observation) if self.shown is None else str(observation[self.shown])

    async def close(self) -> None:
        """Close the connection."""
        if self.client is not None:
            await self.client.close()


class TextArena:
    """Game of TextArena for one of its players; a function plays the others. The seed decides which player it is.

    Arguments are ``num_players``, the dotted path of ``opponent(observation, rng) -> text`` (default
    :func:`random_player`), and the game's own. TextArena draws random numbers from those of the process; here each game
    has its own.
    """

    def reset(self, *, seed: int, options: dict[str, Any]) -> str:
        """Begin a game, and play until it is the player's turn."""
        arguments = {"num_players": 1, "opponent": None} | options["arguments"]
        self.players, path = arguments.pop("num_players"), arguments.pop("opponent")
        self.opponent = import_object(path, "data.arguments.opponent") if path else random_player
        self.me, self.rng = seed % self.players, random.Random(seed)
        self.begin(options["environment"], arguments, seed)
        if self._others_play(False):
            raise ValueError(f"the game is over before the turn of player {self.me}")
        return self.observe()

    def step(self, text: str) -> tuple[str, float, bool, dict]:
        """Play a turn, and those of the others after it."""
        over = self._others_play(self.play(text))
        reward = self.rewards.get(self.me, 0.0) if over else 0.0
        return "" if over else self.observe(), reward, over, {"won": reward > 0} if self.players > 1 and over else {}

    def begin(self, name: str, arguments: dict[str, Any], seed: int) -> None:
        """Begin a game of ``self.players`` players."""
        textarena, self._random = import_package("textarena", "textarena"), None
        with self._drawing():
            self.game = textarena.make(name, **arguments)
            self.game.reset(num_players=self.players, seed=seed)
        self.inner = self.game  # its wrappers repeat earlier messages
        while isinstance(self.inner, textarena.Wrapper):
            self.inner = self.inner.env

    def observe(self) -> str:
        """Return what the player whose turn it is has not seen, without the player's own actions."""
        with self._drawing():
            player, seen = self.inner.get_observation()
        names = self.inner.state.role_mapping
        said = [text if by == -1 else f"[{names.get(by, by)}] {text}" for by, text, _ in seen if by != player]
        return "\n".join(said).strip() or "Your turn."

    def play(self, text: str) -> bool:
        """Play a turn of the player whose turn it is; return whether the game is over."""
        with self._drawing():
            return bool(self.game.step(text)[0])

    @property
    def player(self) -> int:
        """Player whose turn it is."""
        return self.inner.state.current_player_id

    @property
    def rewards(self) -> dict[int, float]:
        """Rewards by player, at the end."""
        return self.inner.state.rewards or {}

    def _others_play(self, over: bool) -> bool:
        while not over and self.player != self.me:
            over = self.play(self.opponent(self.observe(), self.rng))
        return over

    @contextmanager
    def _drawing(self) -> Any:
        with _RANDOM:
            outer = random.getstate()
            random.setstate(self._random or outer)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outer)


def random_player(observation: str, rng: random.Random) -> str:
    """Play one of the moves in brackets that the last line with the word "available" lists."""
    lines = [line for line in observation.splitlines() if "available" in line.lower() and _BRACKETED.search(line)]
    if not lines:
        raise ValueError(f"no line of {observation[-200:]!r} lists available moves; set data.arguments.opponent")
    return rng.choice(_BRACKETED.findall(lines[-1]))
