"""Verification of a bundle: scores, returns, advantages, log-probs, loss and gradient, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import action_tokens, gather_actions, ragged, stack_rows
from torchrl_rloo.diagnostics.bundle import Bundle, BundleError, expected_returns, log_prob_changes, step_numbers
from torchrl_rloo.diagnostics.replay import record_on_cpu
from torchrl_rloo.diagnostics.rescore import Rescorer
from torchrl_rloo.modules.policies import TransformersWrapper
from torchrl_rloo.modules.turns import ScoredActions
from torchrl_rloo.objectives.kl import KL
from torchrl_rloo.objectives.presets import ADVANTAGE_KEYS, LOSS_KEYS
from torchrl_rloo.objectives.rloo import RLOOLoss
from torchrl_rloo.replay.advantage import MCAdvantage
from torchrl_rloo.rewards.registry import RewardSpec
from torchrl_rloo.weight_update.checksums import xxh3

SAFE_REWARDS = ("accuracy", "boxed_accuracy", "exact_match", "multiple_choice", "numeric_match", "think_format")
_PLACE = "place"  # entry of a copied row: its index
MAX_LISTED = 3  # differences of one quantity in the report


class Difference(NamedTuple):
    """Value that differs from its recomputed one.

    Attributes:
        quantity: name, such as ``"advantage"``.
        row: index of the row; None for a number of the whole step.
        token: index of the token in its row; None for a number of a row.
        stored: value in the bundle.
        found: recomputed value.
        tensor: name of the tensor of a checksum; empty for other values.
    """

    quantity: str
    row: int | None
    token: int | None
    stored: Any
    found: Any
    tensor: str = ""

    def __str__(self) -> str:
        """Return the place and both values."""
        place = self.tensor if self.row is None else f"row {self.row}"
        place += "" if self.token is None else f", token {self.token}"
        values = " but ".join(
            f"{word} {value:.7g}" if isinstance(value, float) else f"{word} {value}"
            for word, value in (("stored", self.stored), ("found", self.found))
        )
        return f"{self.quantity}: {place + ': ' if place else ''}{values}"


@dataclass
class Verification:
    """Result of :func:`verify_bundle`.

    Attributes:
        agreed: quantities that agree, with the number of values compared.
        differences: values that differ.
        skipped: quantities that were not compared, and why.
    """

    agreed: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def report(self) -> str:
        """Return a line per quantity, and the first differences of each."""
        lines = [f"{name:<20} agrees: {text}" for name, text in self.agreed.items()]
        for name in dict.fromkeys(difference.quantity for difference in self.differences):
            found = [difference for difference in self.differences if difference.quantity == name]
            lines.append(f"{name:<20} DIFFERS in {len(found)} values")
            lines += [f"  {difference}" for difference in found[:MAX_LISTED]]
        lines += [f"{name:<20} not compared: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)

    def compare(
        self, quantity: str, stored: torch.Tensor, found: torch.Tensor, tolerance: float, row: int | None = None
    ) -> None:
        """Record the values that differ by more than a tolerance; NaN equals NaN.

        Args:
            quantity: name of the values.
            stored: ``[n]`` values of the bundle: of rows, or with ``row`` of its tokens.
            found: ``[n]`` recomputed values.
            tolerance: largest absolute difference, plus the same share of the stored value.
            row: row whose tokens these are.
        """
        stored, found = stored.reshape(-1).double(), found.reshape(-1).double()
        close = torch.isclose(found, stored, rtol=tolerance, atol=tolerance, equal_nan=True)
        for i in (~close).nonzero().flatten().tolist():
            place = (i, None) if row is None else (row, i)
            self.differences.append(Difference(quantity, *place, float(stored[i]), float(found[i])))

    def conclude(self, quantity: str, text: str) -> None:
        """Note that a quantity agrees, if no difference of it was recorded."""
        if not any(difference.quantity == quantity for difference in self.differences):
            self.agreed[quantity] = text


def verify_bundle(
    bundle: Bundle,
    *,
    model: torch.nn.Module | None = None,
    tokenizer: Any = None,
    rewards: Sequence[RewardSpec] | None = None,
    tolerance: float = 1e-4,
    micro_batch_size: int | None = 16,
) -> Verification:
    """Compute the numbers of a bundle again, and say where they differ.

    Reward functions are run if they are given, or if the bundle names only functions of :data:`SAFE_REWARDS`. No other
    name in the file is ever imported.

    Args:
        bundle: the bundle.
        model: model with the weights before the step. None compares neither log-probs of tokens nor the gradient, and
            computes the loss from the stored log-probs.
        tokenizer: its tokenizer.
        rewards: reward functions of the step.
        tolerance: largest difference of log-probs, loss and gradient, absolute and relative. Other values must agree to
            1e-5.
        micro_batch_size: rows per forward and backward pass.

    Raises:
        BundleError: if the settings of the bundle cannot be those of a step.
        ValueError: if the model has another vocabulary than the rows.

    Example::

        result = verify_bundle(read_bundle("step_000040.bundle"))
        print(result.report(), result.ok)
    """
    result, (rows, content) = Verification(), bundle
    try:
        _verify_rewards(result, bundle, rewards)
        _verify_advantages(result, bundle)
        _verify_sampler(result, bundle)
        settings = content["settings"]
        unknown = set(settings.get("loss", {})) - set(LOSS_KEYS)
        if unknown:
            raise ValueError(f"unknown argument {sorted(unknown)[0]!r:.40} of the loss")
        if model is None:
            result.skipped["weights"] = "no model was given"
            result.skipped["log-prob"] = "no model was given"
            result.skipped["gradient norm"] = "no model was given"
            actor: Any = StoredScores()
        else:
            _verify_weights(result, bundle, model)
            actor = _make_actor(content, model, tokenizer, rows)
            again = stack_rows([row.copy() for row in rows.unbind(0)])
            record_on_cpu(actor, again, micro_batch_size=micro_batch_size)
            for i, (row, other) in enumerate(zip(rows.unbind(0), again.unbind(0), strict=True)):
                result.compare("log-prob", row[keys.PROXIMAL_LOG_PROBS], other[keys.PROXIMAL_LOG_PROBS], tolerance, i)
            result.conclude("log-prob", f"{_tokens(rows):,} tokens")
        loss_fn = RLOOLoss(actor, **settings.get("loss", {}))
        if model is None and float(loss_fn.router_loss_coeff):
            result.skipped["loss"] = "its router loss needs the model"
            return result
        parameters = [] if model is None else model.parameters()
        numbers = step_numbers(loss_fn, rows, parameters, micro_batch_size=micro_batch_size)
        names = {"loss": "loss"} | ({} if model is None else {"grad_norm": "gradient norm"})
        for name, quantity in names.items():
            stored, found = float(content["expected"][name]), numbers[name]
            if not math.isclose(stored, found, rel_tol=10 * tolerance, abs_tol=tolerance):
                result.differences.append(Difference(quantity, None, None, stored, found))
            result.conclude(quantity, f"{stored:.6g}")
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, RuntimeError) as error:
        if isinstance(error, _Refused):
            raise ValueError(str(error)) from None
        raise BundleError(f"the bundle's settings cannot be used: {type(error).__name__}: {error}") from error
    return result


class StoredScores(torch.nn.Module):
    """Scorer that returns the log-probs and entropies that rows carry, in place of a model."""

    generate = False
    packing = "none"

    def score(self, rows: TensorDictBase, **_: Any) -> ScoredActions:
        """Return the stored values as leaves with a gradient."""
        actions = action_tokens(rows)
        given = (gather_actions(ragged(rows, key), actions) for key in (keys.PROXIMAL_LOG_PROBS, keys.PROXIMAL_ENTROPY))
        log_probs, entropy = (values.detach().requires_grad_() for values in given)
        return ScoredActions(log_probs, entropy, actions)


class _Refused(ValueError):
    """Error about the arguments of the caller, not about the bundle."""


def _verify_rewards(result: Verification, bundle: Bundle, functions: Sequence[RewardSpec] | None) -> None:
    rows, content = bundle
    notes = content["notes"]
    names, stored = list(notes.get("rewards", [])), _first_scores(rows)
    if functions is None:
        specs = notes.get("functions") or names
        safe = all(isinstance(spec, str) and spec in SAFE_REWARDS for spec in specs)
        functions = specs if safe else None
    if not names or stored is None:
        result.skipped["score"] = "the step has no reward functions"
    elif functions is None:
        result.skipped["score"] = f"the bundle names {', '.join(map(str, names))}; give them to run them"
    elif any(keys.COMPLETION not in row.keys() for row in rows.unbind(0)):
        result.skipped["score"] = "rows have no text"
    else:
        rescorer = Rescorer(list(functions))
        if len(rescorer.names) != stored.shape[1]:
            raise _Refused(f"{len(rescorer.names)} reward functions were given, but the rows have {stored.shape[1]}")
        found = rescorer.scores(rows, content["step"])
        rescorer.close()
        for column, name in enumerate(rescorer.names):
            result.compare(f"score {name}", stored[:, column], found[:, column], 1e-5)
            result.conclude(f"score {name}", f"{len(rows)} rows")
    other = torch.tensor([math.nan if value is None else float(value) for value in content["other_rewards"]])
    returns = torch.stack([reward.reshape(()) for reward in ragged(rows, keys.REWARD)])
    result.compare("return", returns, expected_returns(rows, content) + other, 1e-5)
    result.conclude("return", f"{len(rows)} rows")


def _verify_advantages(result: Verification, bundle: Bundle) -> None:
    rows, settings = bundle.rows, dict(bundle.content["settings"].get("advantage", {}))
    if unknown := set(settings) - {*ADVANTAGE_KEYS, "num_generations", "kl"}:
        raise ValueError(f"unknown argument {sorted(unknown)[0]!r:.40} of the advantages")
    if isinstance(settings.get("kl"), Mapping):
        settings["kl"] = KL(**settings["kl"])
    advantage = MCAdvantage(**settings)
    if hasattr(advantage.estimator, "state_dict"):
        result.skipped["advantage"] = "the estimator has a state from earlier steps"
        return
    copies = [row.exclude(keys.ADVANTAGE).set(_PLACE, torch.tensor(i)) for i, row in enumerate(rows.unbind(0))]
    complete = advantage.inv(stack_rows(copies))  # whole groups, in the order in which they became complete
    written = [] if complete is None else complete.unbind(0)
    again = {int(row[_PLACE]): row[keys.ADVANTAGE].reshape(-1) for row in written}
    for i, row in enumerate(rows.unbind(0)):
        stored, found = row[keys.ADVANTAGE].reshape(-1), again.get(i)
        if found is None or len(found) != len(stored):
            raise ValueError(f"the group of row {i} is not complete")
        if len(stored) > 1:
            result.compare("advantage", stored, found, 1e-5, i)
        elif not math.isclose(float(stored), float(found), rel_tol=1e-5, abs_tol=1e-5):
            result.differences.append(Difference("advantage", i, None, float(stored), float(found)))
    result.conclude("advantage", f"{len(rows)} rows")


def _verify_sampler(result: Verification, bundle: Bundle) -> None:
    """Compare the sampler's log-probs with the trainer's, which may differ as much as they did in the run."""
    limit = 1.01 * float(bundle.content["expected"]["parity_max"]) + 1e-6
    for i, row in enumerate(bundle.rows.unbind(0)):
        places = row[keys.ACTION_MASK].nonzero().flatten()
        for k in (~(log_prob_changes(row) <= limit)).nonzero().flatten().tolist():
            place = int(places[k])
            stored, found = (float(row[key][place]) for key in (keys.LOG_PROBS, keys.PROXIMAL_LOG_PROBS))
            result.differences.append(Difference("sampler log-prob", i, place, stored, found))
    result.conclude("sampler log-prob", f"within {limit:.2g} nats of the trainer's")


def _verify_weights(result: Verification, bundle: Bundle, model: torch.nn.Module) -> None:
    stored = bundle.content["weights"]
    found = {name: xxh3([tensor]) for name, tensor in model.state_dict().items()}
    for name in sorted(stored.keys() | found.keys()):
        if stored.get(name) != found.get(name):
            pair = (stored.get(name, "nothing"), found.get(name, "nothing"))
            result.differences.append(Difference("weights", None, None, *pair, tensor=name))
    result.conclude("weights", f"{len(stored)} tensors")


def _make_actor(
    content: Mapping[str, Any], model: torch.nn.Module, tokenizer: Any, rows: TensorDictBase
) -> TransformersWrapper:
    largest = max(int(row[keys.TOKENS].max()) for row in rows.unbind(0))
    if largest >= (size := model.get_input_embeddings().num_embeddings):
        raise _Refused(f"token id {largest} must be below the {size} ids of the model; give the model of the bundle")
    given = content["settings"].get("scoring", {})
    scoring = {name: given[name] for name in ("precision", "float32_head") if name in given}
    generate = {name: value for name, value in content["notes"].get("generate", {}).items() if name != "seed"}
    return TransformersWrapper(model, tokenizer=tokenizer, generate=False, generate_kwargs=generate, **scoring)


def _first_scores(rows: TensorDictBase) -> torch.Tensor | None:
    """Return the scores ``[B, F]`` as the functions gave them, before shaping."""
    key = keys.RAW_REWARDS if keys.RAW_REWARDS in rows[0].keys(True) else keys.REWARDS
    return torch.stack(ragged(rows, key)) if key in rows[0].keys(True) else None


def _tokens(rows: TensorDictBase) -> int:
    return sum(int(row[keys.ACTION_MASK].sum()) for row in rows.unbind(0))
