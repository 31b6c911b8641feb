"""Checks of the prompts: duplicates, overlap with held-out prompts, missing answers, chat template and stop ids."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from torchrl_rloo.data import keys
from torchrl_rloo.data.prompts import PromptDataset
from torchrl_rloo.data.templates import encode, encode_prompt, encode_prompts, render
from torchrl_rloo.diagnostics.checks.base import Facts, Finding
from torchrl_rloo.images.parts import content_text, image_paths

DUPLICATE_SHARE = 0.1  # copies up to this share of the rows change the weights of prompts little
ERROR_SHARE = 0.5
BEGINNING_GAIN = 0.5  # nats a token that the beginning-of-text token may save before its absence is an error


def normalize_text(text: str) -> str:
    """Return a text without differences of case, width, white space, quotes around it and punctuation at its end.

    Signs inside the text stay, because ``1+2`` and ``1-2`` are different prompts.

    Example:
        >>> normalize_text("  What is\\n1+2 ?") == normalize_text("what is 1+2?")
        True
        >>> normalize_text("1+2") == normalize_text("1-2")
        False
    """
    words = unicodedata.normalize("NFKC", text).casefold().split()
    return " ".join(words).strip("\"'`").rstrip(".?!:;, ").strip("\"'`")


def prompt_text(query: Any) -> str:
    """Return what distinguishes a prompt: its text, or its messages without the system's."""
    if isinstance(query, str):
        return query
    return "\n".join(content_text(message["content"]) for message in query if message["role"] != "system")


def check_duplicates(facts: Facts) -> Finding:
    """Count rows that repeat an earlier one: the same prompt, up to case and spaces, with the same answer.

    Only the columns that rewards require are compared, or all if the environment rewards, as in a game.
    """
    columns = facts.answer_columns if facts.functions else facts.train.columns
    seen = {(_task_and_text(row), repr([row[name] for name in columns])) for row in facts.train.rows}
    total = len(facts.train)
    copies = total - len(seen)
    if copies <= DUPLICATE_SHARE * total:
        return Finding("ok", f"{copies} of {total:,} training rows repeat another")
    level = "error" if copies >= ERROR_SHARE * total else "warn"
    sentence = f"{copies:,} of {total:,} training rows repeat another, up to case and spaces"
    return Finding(level, sentence, "remove them: their prompts are drawn more often, and split over train and test")


def check_overlap(facts: Facts) -> Finding:
    """Count held-out prompts that are also trained on."""
    trained = {_task_and_text(row) for row in facts.train.rows}
    exact = {prompt_text(row[keys.QUERY]) for row in facts.train.rows}
    held_out = facts.held_out.rows
    shared = [row for row in held_out if _task_and_text(row) in trained]
    if not shared:
        return Finding("ok", f"none of {len(held_out):,} held-out prompts is trained on")
    verbatim = sum(prompt_text(row[keys.QUERY]) in exact for row in shared)
    sentence = f"{len(shared):,} of {len(held_out):,} held-out prompts are also trained on, {verbatim:,} word for word"
    example = f", such as {prompt_text(shared[0][keys.QUERY])!r:.80}"
    level = "error" if len(shared) >= ERROR_SHARE * len(held_out) else "warn"
    return Finding(level, sentence + example, "remove them from data.source, or set another data.eval_source")


def check_answers(facts: Facts) -> list[Finding]:
    """Count rows without a value in a column that the rewards require."""
    found, names = [], []
    for column in facts.answer_columns:
        rows = [row for row in _rows_of_column(facts.train, column)]
        empty = sum(_is_empty(row[column]) for row in rows)
        if not empty:
            names.append(column)
            continue
        level = "error" if empty >= ERROR_SHARE * len(rows) else "warn"
        sentence = f"column {column!r}, which the rewards read, is empty in {empty:,} of {len(rows):,} training rows"
        found.append(Finding(level, sentence, "fill it, rename a column (data.column_map), or remove these rows"))
    if names and not found:
        return [Finding("ok", f"no value is missing in {', '.join(names)}")]
    return found


def _rows_of_column(dataset: PromptDataset, column: str) -> Sequence[dict[str, Any]]:
    """Return the rows that have a column; in a mixture those of the tasks that fill it."""
    tasks = {row.get(keys.TASK) for row in dataset.rows if row.get(column) is not None}
    return [row for row in dataset.rows if row.get(keys.TASK) in tasks] if tasks else dataset.rows


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or (hasattr(value, "__len__") and not value)


def _task_and_text(row: dict[str, Any]) -> tuple[Any, str]:
    return row.get(keys.TASK), normalize_text(prompt_text(row[keys.QUERY]))


# Chat template


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


def check_beginning(facts: Facts) -> Finding | None:
    """Check that prompts begin with the beginning-of-text token if the model was trained with it."""
    if facts.beginning_losses is None:
        return None
    (without, with_bos), bos = facts.beginning_losses, facts.tokenizer.bos_token
    sentence = (
        f"a plain text costs the model {without:.2f} nats a token as prompts begin, and {with_bos:.2f} after {bos!r}"
    )
    if without - with_bos <= BEGINNING_GAIN:
        return Finding("ok", sentence)
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return Finding(
        "error",
        f"{sentence}, which the tokenizer does not add",
        f"set model.chat_template to one that begins with {{{{ bos_token }}}}, for plain text to {template!r}",
    )


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
    images = [() if isinstance(query, str) else tuple(image_paths(query)) for query in queries]
    ids = set(zip(map(tuple, encode_prompts(facts.tokenizer, queries, **facts.template_kwargs)), images, strict=True))
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
            texts = [content] if isinstance(content, str) else [p["text"] for p in content or () if p["type"] == "text"]
            for text in texts:
                if "".join(text.split()) not in shown:
                    missing.setdefault(message["role"], text)
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
