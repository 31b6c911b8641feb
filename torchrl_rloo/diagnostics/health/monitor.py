"""Evaluation of rules at each step of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchrl_rloo.diagnostics.health.rule import SEVERITIES, Event, Evidence, History, Rule
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
        # Metrics of the clock are kept apart, so that the saved state is equal for equal seeds
        self._histories = {
            clock: History(metric for rule in self.rules if rule.clock == clock for metric in rule.metrics)
            for clock in (False, True)
        }
        self._states = {rule.name: _State() for rule in self.rules}
        self._off: set[str] = set()

    @property
    def firing(self) -> list[str]:
        """Names of the rules that have fired and not cleared."""
        return [name for name, state in self._states.items() if state.firing]

    def update(
        self, step: int, metrics: Mapping[str, float], timings: Mapping[str, float] | None = None
    ) -> list[Event]:
        """Evaluate all rules on the metrics of a step.

        Args:
            step: number of the step.
            metrics: values by name.
            timings: values that depend on the clock, read by rules with ``clock=True`` in addition to ``metrics``.

        Returns:
            Rules that fired or cleared at this step, in the order of the rules.
        """
        self._histories[False].append(step, metrics)
        self._histories[True].append(step, {**metrics, **(timings or {})})
        events = []
        for rule in self.rules:
            history = self._histories[rule.clock]
            if rule.name not in self._off and _has_value(rule, history):
                events += self._evaluate(rule, history)
        return events

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
        states = {rule.name: vars(self._states[rule.name]).copy() for rule in self.rules if not rule.clock}
        return {"history": self._histories[False].state_dict(), "rules": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`. Rules that it lacks begin again, and rules of the clock always do."""
        self._histories[False].load_state_dict(state["history"])
        for name, saved in state["rules"].items():
            if name in self._states:
                self._states[name] = _State(**saved)

    def _evaluate(self, rule: Rule, history: History) -> list[Event]:
        state = self._states[rule.name]
        try:
            evidence = rule.condition(history)
        except Exception:
            _LOGGER.exception("health rule %s failed at step %d and is off from now on", rule.name, history.step)
            self._off.add(rule.name)
            return []
        if not state.advance(evidence is not None, history.step, rule):
            return []
        return [_event(rule, state, history.step, evidence)]


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


def load_rules(paths: Sequence[str], ignore: Sequence[str] = ()) -> tuple[Rule, ...]:
    """Return the rules of the table without the ignored ones, and then those at dotted paths."""
    rules = {rule.name: rule for rule in RULES}
    for path in paths:
        found = import_object(path, "health rule")
        found = [found] if isinstance(found, Rule) else found
        if not isinstance(found, (list, tuple)) or not all(isinstance(rule, Rule) for rule in found):
            raise ValueError(f"health.rules: {path} is a {type(found).__name__}; it must be a Rule or a list of them")
        rules |= {rule.name: rule for rule in found}
    if unknown := [name for name in ignore if name not in rules]:
        raise ValueError(f"health.ignore={list(ignore)}: unknown rule {unknown[0]!r}{did_you_mean(unknown[0], rules)}")
    return tuple(rule for name, rule in rules.items() if name not in ignore)


def make_health(
    rules: Sequence[str] = (),
    ignore: Sequence[str] = (),
    stop_on: Sequence[str] = ("nan",),
    rollback: Mapping[str, Any] | None = None,
) -> Health:
    """Build :class:`Health` from settings.

    Args:
        rules: further rules, see :func:`load_rules`.
        ignore: names of rules to leave out.
        stop_on: see :class:`Health`; names of ignored rules have no effect.
        rollback: ``on``, ``lr_factor`` and ``max_rollbacks``, see :class:`Health`. None never goes back.

    Raises:
        ValueError: if a name is unknown or a number is out of range.
    """
    table, given = load_rules(rules, ignore), dict(rollback or {})
    return Health(
        table, stop_on=[name for name in stop_on if name not in ignore], rollback_on=given.pop("on", ()), **given
    )


def check_names(argument: str, given: Sequence[str], rules: Sequence[str]) -> None:
    """Raise unless all given names are names of rules or severities."""
    for name in given:
        if name not in rules and name not in SEVERITIES:
            hint = did_you_mean(name, [*rules, *SEVERITIES])
            raise ValueError(f"{argument}={list(given)}: {name!r} is no rule and no severity{hint}")


def _has_value(rule: Rule, history: History) -> bool:
    names = [name for pattern in rule.at or rule.metrics[:1] for name in (pattern, *history.matching(pattern))]
    return any(name in history.current for name in names)


def _event(rule: Rule, state: _State, step: int, evidence: Evidence | None) -> Event:
    event = Event(
        step, rule.name, rule.severity, "fired", rule.sentence, rule.remedy, dict(evidence or {}), state.since
    )
    return event if state.firing else replace(event, state="cleared", since=step)
