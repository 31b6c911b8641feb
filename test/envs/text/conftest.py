"""Conversations with a scripted policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_rloo.collectors import LLMCollector
from torchrl_rloo.engines import ScriptedEngine, ScriptedTurn
from torchrl_rloo.modules import vLLMWrapper

# Modules of test/envs/text/verifiers_rows.py, which .ci/environments.py runs where verifiers is installed
collect_ignore = ["verifiers_guess.py", "verifiers_sums.py"]


@pytest.fixture
def make_policy(tokenizer) -> Iterator[Callable[..., vLLMWrapper]]:
    """Return ``make_policy(say)``: turn ``k`` of a conversation is ``say(k, prompt)``; None is a cut-off turn."""
    engines = []

    def make(say: Callable[[int, str], str | None]) -> vLLMWrapper:
        def script(request, index) -> ScriptedTurn:
            prompt = tokenizer.decode(request.prompt)
            said = say(prompt.count("<|im_start|>assistant") - 1, prompt)
            if said is None:
                return ScriptedTurn(tokenizer("mmm")["input_ids"], finish="length")
            return ScriptedTurn([*tokenizer(said)["input_ids"], tokenizer.eos_token_id])

        engines.append(ScriptedEngine(script))
        return vLLMWrapper(engines[-1], tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 64})

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def play(make_policy: Callable) -> Callable[..., list[TensorDictBase]]:
    """Return ``play(env, say)``, which collects the rows of one batch."""

    def run(env: EnvBase, say: Callable[[int, str], str | None]) -> list[TensorDictBase]:
        return list(LLMCollector(env, make_policy(say)).collect().unbind(0))

    return run
