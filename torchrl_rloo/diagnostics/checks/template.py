"""Checks of the chat template: prompts arrive whole, the assistant's turn is opened, and a stop id ends it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import encode, encode_prompt, encode_prompts, render
from torchrl_rloo.diagnostics.checks.base import Facts, Finding

PROMPTS = 32  # prompts to render
ANSWER = "Forty-two"  # text of an assistant's turn that no template writes by itself


def check_template(facts: Facts) -> Iterator[Finding]:
    """Encode prompts and decode them again: the messages, the opened turn and its end must be there."""
    queries = _choose([row[keys.QUERY] for row in facts.train.rows])
    if isinstance(queries[0], str):
        yield _compare_ids(facts, queries) or Finding("ok", "prompts are plain text, without a chat template")
        return
    problems = [_compare_ids(facts, queries), _find_messages(facts, queries), _find_opening(facts, queries)]
    yield from (problem for problem in problems if problem is not None)
    if not any(problems):
        yield Finding("ok", f"{len(queries)} prompts keep their messages, and open the assistant's turn")


def check_stop_ids(facts: Facts) -> Finding:
    """Check that sampling stops where the chat template ends an assistant's turn."""
    tokenizer, names = facts.tokenizer, [_name(facts.tokenizer, i) for i in facts.stop_ids]
    if not facts.stop_ids and not facts.stop_strings:
        sentence = f"nothing ends a turn, so each has all {facts.plan.max_new_tokens} tokens"
        return Finding("error", sentence, "set eos_token of the tokenizer, or generate.stop_token_ids")
    known = ", ".join(names) or repr(list(facts.stop_strings))
    end = _end_of_turn(facts)
    if end is None:
        return Finding("ok", f"a turn ends with {known}")
    if not end.strip():
        sentence = "the chat template writes nothing after an assistant's turn"
        return Finding("warn", sentence, "add the end-of-turn token to model.chat_template")
    if set(encode(tokenizer, end)) & set(facts.stop_ids) or any(text in end for text in facts.stop_strings):
        return Finding("ok", f"a turn ends with {known}, as the chat template writes it")
    sentence = f"the chat template ends a turn with {end.strip()!r}, but sampling stops only at {known}"
    ids = encode(tokenizer, end.strip())[:1]
    return Finding("error", sentence, f"set generate.stop_token_ids={ids}, or correct eos_token of the tokenizer")


def _choose(queries: list[Any]) -> list[Any]:
    """Return up to :data:`PROMPTS` prompts, the same in every run."""
    return queries if len(queries) <= PROMPTS else random.Random(0).sample(queries, PROMPTS)


def _compare_ids(facts: Facts, queries: list[Any]) -> Finding | None:
    """Report different prompts that have the same ids."""
    texts = {repr(query) for query in queries}
    ids = {tuple(each) for each in encode_prompts(facts.tokenizer, queries, **facts.template_kwargs)}
    if len(ids) == len(texts):
        return None
    sentence = f"{len(texts)} different prompts have only {len(ids)} different encodings, so the policy cannot see them"
    return Finding("error", sentence, "correct model.chat_template or data.prompt_column")


def _find_messages(facts: Facts, queries: list[Any]) -> Finding | None:
    """Report messages that the template leaves out."""
    missing: dict[str, str] = {}
    for query in queries:
        shown = "".join(facts.tokenizer.decode(encode_prompt(facts.tokenizer, query, **facts.template_kwargs)).split())
        for message in query:
            content = message["content"]
            if isinstance(content, str) and "".join(content.split()) not in shown:
                missing.setdefault(message["role"], content)
    if not missing:
        return None
    role = "user" if "user" in missing else next(iter(missing))
    sentence = f"the encoded prompt does not contain the {role} message {missing[role]!r:.60}"
    level = "error" if "user" in missing else "warn"
    return Finding(level, sentence, "correct model.chat_template; the policy sees only what it writes")


def _find_opening(facts: Facts, queries: list[Any]) -> Finding | None:
    """Report a template that does not open the assistant's turn."""
    query = next((query for query in queries if query[-1]["role"] != "assistant"), None)
    if query is None:
        return None
    closed, opened = (
        render(facts.tokenizer, query, **{**facts.template_kwargs, "add_generation_prompt": opens})
        for opens in (False, True)
    )
    if opened != closed:
        return None
    sentence = "the chat template ignores add_generation_prompt, so the policy has to write the assistant's header"
    return Finding("warn", sentence, "add it to model.chat_template: {% if add_generation_prompt %}...{% endif %}")


def _end_of_turn(facts: Facts) -> str | None:
    """Return what the template writes after an assistant's text; None for plain text."""
    query = facts.train.rows[0][keys.QUERY]
    if isinstance(query, str) or not getattr(facts.tokenizer, "chat_template", None):
        return None
    messages = [*query[: len(query) - (query[-1]["role"] == "assistant")], {"role": "assistant", "content": ANSWER}]
    text = render(facts.tokenizer, messages, **facts.template_kwargs)
    return text.rpartition(ANSWER)[2] if ANSWER in text else None


def _name(tokenizer: Any, index: int) -> str:
    return repr(tokenizer.decode([index], skip_special_tokens=False))
