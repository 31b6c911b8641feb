"""Keyword search tool over a corpus in memory. Requires the extra ``tools``."""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from torchrl_rloo.envs.tools.tool import Tool

# Search scripts without spaces between words, kana and Chinese, by character
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]+")


class Document(NamedTuple):
    """Document of the corpus; the title may be empty."""

    title: str
    text: str


class Hit(NamedTuple):
    """Matching document, its BM25 score, and the excerpt of its text with the most query words."""

    document: Document
    score: float
    snippet: str


class SearchTool(Tool):
    """Tool that returns the ``k`` best documents for a query by BM25, with title, score and excerpt.

    Case and Unicode form of words are ignored; Chinese and Japanese are searched by character. The index is built once
    and only read afterwards, so any number of threads may search at a time. Ties keep the order of the documents.

    Args:
        documents: strings, or mappings with ``"text"`` and optionally ``"title"``, or the path of a ``.jsonl`` file
            with one of either per line. Other keys are ignored.
        k: maximum number of documents that a query returns.
        max_chars: maximum length of an excerpt, in characters.
        name: name of the tool for the policy.
        description: description for the policy. None is a general one.
        timeout: limit of a call, in seconds; see :class:`~torchrl_rloo.envs.tools.tool.Tool`.

    Raises:
        ValueError: if ``k`` or ``max_chars`` is below 1, no document has a word, or one has no text or is not JSON.
        ImportError: if ``bm25s`` is not installed.

    Example:
        >>> search = SearchTool([
        ...     {"title": "Otters", "text": "Otters hold hands while they sleep."},
        ...     {"title": "Bees", "text": "Bees dance to say where flowers are."},
        ... ], k=1)
        >>> print(search.call(None, query="where do otters sleep?"))
        [1] Otters (score 0.69)
        Otters hold hands while they sleep.
        >>> print(search.call(None, query="submarines"))
        No document has any of the words of 'submarines'. Try other words.
    """

    def __init__(
        self,
        documents: str | os.PathLike | Iterable[str | Mapping[str, Any]],
        k: int = 3,
        *,
        max_chars: int = 500,
        name: str = "search",
        description: str | None = None,
        timeout: float | None = None,
    ):
        for setting, value in (("k", k), ("max_chars", max_chars)):
            if value < 1:
                raise ValueError(f"{setting}={value} must be at least 1")
        query = {"type": "string", "description": "Words to search for."}
        super().__init__(
            name,
            description or f"Searches a collection of documents and returns excerpts of the {k} best matches.",
            {"type": "object", "properties": {"query": query}, "required": ["query"]},
            timeout=timeout,
        )
        self.k, self.max_chars = k, max_chars
        self.documents = [_document(item, place) for item, place in _read_documents(documents)]
        self._index = _build_index(self.documents)

    def search(self, query: str) -> list[Hit]:
        """Return up to ``k`` hits, best first; documents without any of the query's words are left out."""
        known = [word for word in words(query) if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)
        worst = np.partition(scores, -self.k)[-self.k] if self.k < len(scores) else 0.0
        candidates = np.flatnonzero((scores >= worst) & (scores > 0))
        best = candidates[np.argsort(-scores[candidates], kind="stable")][: self.k]
        return [
            Hit(self.documents[i], float(scores[i]), excerpt(self.documents[i].text, known, self.max_chars))
            for i in best.tolist()
        ]

    def call(self, state: None, /, query: str) -> str:
        """Return the best documents as text, or the reason why there are none."""
        if not words(query):
            return "The query has no words. Give words to search for."
        hits = self.search(query)
        if not hits:
            return f"No document has any of the words of {query[:200]!r}. Try other words."
        return "\n\n".join(
            f"[{place}]{hit.document.title and ' '}{hit.document.title} (score {hit.score:.2f})\n{hit.snippet}"
            for place, hit in enumerate(hits, 1)
        )


def words(text: str) -> list[str]:
    """Split a text into normalized words, as the index does."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def excerpt(text: str, wanted: Iterable[str], max_chars: int) -> str:
    """Return the part of a text that has the most of the wanted words, with ``...`` where text is left out."""
    if len(text) <= max_chars:
        return text.strip()
    wanted = set(wanted)
    found = [(m.start(), word) for m in _WORD.finditer(text) for word in words(m.group()) if word in wanted]

    # Find the window with the most distinct words
    best, max_distinct, first, in_window = 0, 0, 0, Counter()
    for position, word in found:
        in_window[word] += 1
        while position - found[first][0] > max_chars * 0.8:
            passed, first = found[first][1], first + 1
            in_window[passed] -= 1
            if not in_window[passed]:
                del in_window[passed]
        if len(in_window) > max_distinct:
            best, max_distinct = found[first][0], len(in_window)

    # Cut between words, unless a word is too long for that
    start = max(0, min(best - max_chars // 5, len(text) - max_chars))
    end = start + max_chars
    if start:
        start = min((m.end() for m in re.finditer(r"\s", text[start : start + max_chars // 5])), default=0) + start
    cut = text[start:end] if end >= len(text) else text[start:end].rpartition(" ")[0] or text[start:end]
    return f"{'... ' if start else ''}{cut.strip()}{' ...' if end < len(text) else ''}"


def _read_documents(documents: str | os.PathLike | Iterable[str | Mapping[str, Any]]) -> Iterable[tuple[Any, str]]:
    """Yield each document with its place, for error messages."""
    if not isinstance(documents, str | os.PathLike):
        yield from ((item, f"document {i}") for i, item in enumerate(documents))
        return
    with Path(documents).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                place = f"{documents}, line {number}"
                try:
                    yield json.loads(line), place
                except ValueError as error:
                    raise ValueError(f"{place} is not JSON: {error}") from error


def _document(item: Any, place: str) -> Document:
    if isinstance(item, str):
        return Document("", item)
    if not isinstance(item, Mapping) or not isinstance(item.get("text"), str):
        raise ValueError(f"{place} must be a string or a mapping with a string 'text', got {item!r:.100}")
    return Document(str(item.get("title") or ""), item["text"])


@contextmanager
def _without_numba() -> Iterator[None]:
    """Hide numba from an import that can do without it: vLLM's CPU build does not start once llvmlite is loaded."""
    if "numba" in sys.modules:
        yield
        return
    sys.modules["numba"] = None
    try:
        yield
    finally:
        del sys.modules["numba"]


def _build_index(documents: Sequence[Document]) -> Any:
    try:
        with _without_numba():
            import bm25s
    except ImportError as error:
        raise ImportError("bm25s is not installed: pip install 'torchrl_rloo[tools]'") from error
    vocabulary: dict[str, int] = {}
    ids = [
        [vocabulary.setdefault(word, len(vocabulary)) for word in words(f"{title}\n{text}")]
        for title, text in documents
    ]
    if not vocabulary:
        raise ValueError(f"documents={documents!r:.100} must have at least one word to search for")
    index = bm25s.BM25()
    index.index((ids, vocabulary), show_progress=False, create_empty_token=False)
    return index
