"""Evaluation of rules at each step of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torchrl_rloo.diagnostics.health.rule import SEVERITIES, Event, History, Rule
from torchrl_rloo.diagnostics.health.table import RULES
from torchrl_rloo.runtime.lookup import did_you_mean, import_object

_LOGGER = logging.getLogger(__name__)


class Health:
    """Rules about a run, evaluated at each step in bounded memory.

    A rule fires once, with its evidence, and clears when the evidence has been absent for its ``recovery``. A rule
    whose condition raises is turned off with a logged error, since a rule must not end a run.

    Args:
        rules: rules to evaluate.
        stop_on: names of rules or severities that end the run.
        rollback_on: names of rules or severities that take the run back to the newest checkpoint before the evidence.
            They precede ``stop_on``.
        lr_factor: factor of the learning rates after each rollback. With 1, a run with the same seed repeats itself.
        max_rollbacks: rollbacks after which these rules end the run.

    Raises:
        ValueError: if two rules have the same name, or an argument is out of range or has an unknown name.

    Example:
        >>> health = Health()
        >>> [event.rule for event in health.update(1, {"loss": float("nan")})]
        ['nan']
        >>> health.update(2, {"loss": float("nan")})
        []
    """

    def __init__(
        self,
        rules: Iterable[Rule] = RULES,
        *,
        stop_on: Sequence[str] = ("nan",),
        rollback_on: Sequence[str] = (),
        lr_factor: float = 0.5,
        max_rollbacks: int = 3,
    ) -> None:
        self.rules = tuple(rules)
        names = [rule.name for rule in self.rules]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rules has {repeated} more than once; rename one of them")
        for argument, given in (("stop_on", stop_on), ("rollback_on", rollback_on)):
            check_names(argument, given, names)
        if not 0 < lr_factor <= 1:
            raise ValueError(f"lr_factor={lr_factor} must be above 0 and at most 1")
        if max_rollbacks < 1:
            raise ValueError(f"max_rollbacks={max_rollbacks} must be at least 1")
        self.lr_factor, self.max_rollbacks = lr_factor, max_rollbacks
        self.stop_on, self.rollback_on = tuple(stop_on), tuple(rollback_on)
        self._history = History(metric for rule in self.rules for metric in rule.metrics)
        self._states = {rule.name: _State() for rule in self.rules}
        self._off: set[str] = set()

    def update(self, step: int, metrics: Mapping[str, float]) -> list[Event]:
        """Evaluate all rules on the metrics of a step, and return those that fired or cleared, in their order."""
        self._history.append(step, metrics)
        return [event for rule in self.rules if (event := self._evaluate(rule)) is not None]

    def action(self, event: Event) -> str | None:
        """Return what an event asks of the run: ``"rollback"``, ``"stop"`` or None."""
        if event.state != "fired":
            return None
        for action, names in (("rollback", self.rollback_on), ("stop", self.stop_on)):
            if event.rule in names or event.severity in names:
                return action
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics kept and the state of each rule, as plain values."""
        states = {name: vars(state).copy() for name, state in self._states.items()}
        return {"history": self._history.state_dict(), "rules": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Rules that it lacks begin again."""
        self._history.load_state_dict(state["history"])
        for name, saved in state["rules"].items():
            if name in self._states:
                self._states[name] = _State(**saved)

    def _evaluate(self, rule: Rule) -> Event | None:
        history, state = self._history, self._states[rule.name]
        read = [name for pattern in rule.at or rule.metrics[:1] for name in (pattern, *history.matching(pattern))]
        if rule.name in self._off or not any(name in history.current for name in read):
            return None
        try:
            evidence = rule.condition(history)
        except Exception:
            _LOGGER.exception("health rule %s failed at step %d and is off from now on", rule.name, history.step)
            self._off.add(rule.name)
            return None
        if not state.advance(evidence is not None, history.step, rule):
            return None
        word, since = ("fired", state.since) if state.firing else ("cleared", history.step)
        texts = (rule.sentence, rule.remedy, dict(evidence or {}))
        return Event(history.step, rule.name, rule.severity, word, *texts, since)


class _State:
    """Consecutive evaluations of a rule with or without evidence, and whether it has fired."""

    def __init__(self, held: int = 0, quiet: int = 0, since: int = 0, firing: bool = False) -> None:
        self.held, self.quiet, self.since, self.firing = held, quiet, since, firing

    def advance(self, holds: bool, step: int, rule: Rule) -> bool:
        """Count an evaluation and return whether the rule fires or clears by it."""
        if holds:
            self.since = step if not self.held else self.since
            self.held, self.quiet = self.held + 1, 0
        else:
            self.held, self.quiet = 0, self.quiet + 1
        changes = self.quiet >= rule.recovery if self.firing else self.held >= rule.patience
        self.firing ^= changes
        return changes


def make_health(
    rules: Sequence[str] = (),
    ignore: Sequence[str] = (),
    stop_on: Sequence[str] = ("nan",),
    rollback: Mapping[str, Any] | None = None,
) -> Health:
    """Build :class:`Health` from settings.

    Args:
        rules: dotted paths of a :class:`Rule` or of a list of them; one with a name of the table replaces that rule.
        ignore: names of rules to leave out.
        stop_on: see :class:`Health`; names of ignored rules have no effect.
        rollback: ``on``, ``lr_factor`` and ``max_rollbacks``, see :class:`Health`. None never goes back.

    Raises:
        ValueError: if a name is unknown or a number is out of range.
    """
    table = {rule.name: rule for rule in RULES}
    for path in rules:
        found = import_object(path, "health rule")
        found = [found] if isinstance(found, Rule) else found
        if not isinstance(found, (list, tuple)) or not all(isinstance(rule, Rule) for rule in found):
            raise ValueError(f"health.rules: {path} is a {type(found).__name__}; it must be a Rule or a list of them")
        table |= {rule.name: rule for rule in found}
    if unknown := [name for name in ignore if name not in table]:
        raise ValueError(f"health.ignore={list(ignore)}: unknown rule {unknown[0]!r}{did_you_mean(unknown[0], table)}")
    chosen, given = [rule for name, rule in table.items() if name not in ignore], dict(rollback or {})
    kept = [name for name in stop_on if name not in ignore]
    return Health(chosen, stop_on=kept, rollback_on=given.pop("on", ()), **given)


def check_names(argument: str, given: Sequence[str], rules: Sequence[str]) -> None:
    """Raise unless all given names are names of rules or severities."""
    for name in given:
        if name not in rules and name not in SEVERITIES:
            hint = did_you_mean(name, [*rules, *SEVERITIES])
            raise ValueError(f"{argument}={list(given)}: {name!r} is no rule and no severity{hint}")
