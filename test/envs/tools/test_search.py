"""SearchTool: scores, excerpts, messages and concurrent searches."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_rloo.envs.tools.search import SearchTool, excerpt, words

ANIMALS = [
    {"title": "Otters", "text": "Otters hold hands while they sleep.", "source": "a book"},
    {"title": "Bees", "text": "Bees dance to say where flowers are, and sleep in flowers."},
    "Cats sleep most of the day.",
]


def titles(search: SearchTool, query: str) -> list[str]:
    return [hit.document.title for hit in search.search(query)]


def test_the_best_come_first_with_title_score_and_text() -> None:
    search = SearchTool(ANIMALS, k=2)
    assert titles(search, "flowers dance sleep hands") == ["Bees", "Otters"]
    lines = search.call(None, query="day").splitlines()
    assert lines == [f"[1] (score {search.search('day')[0].score:.2f})", "Cats sleep most of the day."]
    assert titles(search, "otters") == ["Otters"], "titles are searched"
    assert titles(SearchTool(ANIMALS, k=9), "sleep") == ["", "Otters", "Bees"], "shorter ones before longer ones"
    assert titles(search, "document 0 title source book") == [], "neither places nor other entries are"


def test_equal_scores_are_in_the_order_of_the_documents() -> None:
    search = SearchTool([{"title": str(i), "text": "same words"} for i in range(50)], k=5)
    assert titles(SearchTool(["x " * i for i in range(1, 3)] + ANIMALS), "none") == []
    assert titles(search, "words") == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("query", ["", " \n", "?!...", "_"])
def test_a_query_without_words_is_told_so(query: str) -> None:
    assert SearchTool(ANIMALS).call(None, query=query) == "The query has no words. Give words to search for."


def test_no_hit_is_told_so_and_not_at_any_length() -> None:
    search = SearchTool(ANIMALS)
    assert search.call(None, query="submarine") == ("No document has any of the words of 'submarine'. Try other words.")
    assert len(search.call(None, query="xyz " * 100_000)) < 400


def test_unicode() -> None:
    texts = ["東京は日本の首都です", "Die Straße nach Köln", "ﬁne café", "Москва — столица", "emoji 🙂 only"]
    search = SearchTool([{"title": str(i), "text": text} for i, text in enumerate(texts)])
    for query, found in {"東京": "0", "STRASSE": "1", "köln": "1", "fine": "2", "café": "2", "МОСКВА": "3"}.items():
        assert titles(search, query) == [found], query
    assert words("a_b ＸＹ 2+3=5") == ["a", "b", "xy", "2", "3", "5"]
    assert search.call(None, query="\ud800 \x00") == "The query has no words. Give words to search for."


@settings(deadline=None, max_examples=100)
@given(st.text(st.sampled_from("ab c\n"), max_size=80), st.integers(1, 40))
def test_an_excerpt_is_part_of_the_text_and_no_longer(text: str, max_chars: int) -> None:
    cut = excerpt(text, ["b"], max_chars)
    core = cut.removeprefix("... ").removesuffix(" ...")
    assert len(core) <= max_chars and core.strip() in text


def test_an_excerpt_is_where_the_words_are() -> None:
    text = "filler " * 300 + "the blue whale sings " + "filler " * 300 + "a whale"
    cut = excerpt(text, ["blue", "whale"], 60)
    assert "the blue whale sings" in cut and cut.startswith("... ") and cut.endswith(" ...") and len(cut) <= 68
    assert excerpt(text, ["nothing"], 60).startswith("filler")
    hit = SearchTool([text], max_chars=60).search("Blue WHALE")[0]
    assert hit.snippet == cut


def test_a_jsonl_file(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(a, ensure_ascii=False) for a in [*ANIMALS, "köln"]) + "\n\n", encoding="utf-8")
    for given_path in (path, str(path)):
        search = SearchTool(given_path)
        assert len(search.documents) == 4 and titles(search, "bees") == ["Bees"]
        assert search.search("KÖLN")[0].document.text == "köln"
    path.write_text('"fine"\n{"text": \n')
    with pytest.raises(ValueError, match=r"corpus.jsonl, line 2 is not JSON"):
        SearchTool(path)
    path.write_text('"fine"\n{"title": "no text"}\n')
    with pytest.raises(ValueError, match=r"corpus.jsonl, line 2 must be a string or a mapping with a string 'text'"):
        SearchTool(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": []}, r"documents=\[\] must have at least one word"),
        ({"documents": ["", " "]}, "must have at least one word to search for"),
        ({"documents": ["!"]}, "must have at least one word to search for"),
        ({"documents": [3]}, "document 0 must be a string"),
        ({"documents": ["a"], "k": 0}, "k=0 must be at least 1"),
        ({"documents": ["a"], "max_chars": 0}, "max_chars=0 must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SearchTool(**arguments)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'torchrl_rloo[tools]'")):
        SearchTool(["a"])


def test_a_search_leaves_the_process_fit_for_vllm():
    """A search does not load numba's llvmlite, with which vLLM's CPU build does not start."""
    program = (
        "import sys; from torchrl_rloo.envs.tools.search import SearchTool\n"
        "before = 'llvmlite' in sys.modules\n"
        "print(SearchTool(['a cat', 'a dog']).call(None, query='cat'))\n"
        "assert ('llvmlite' in sys.modules) == before and sys.modules.get('numba', 0) is not None"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "cat" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("title", ["", "Two  spaces", " otters", "tabs\t\tstay", "a   b"])
def test_a_title_is_shown_as_it_is(title):
    shown = SearchTool([{"title": title, "text": "Otters  sleep."}]).call(None, query="otters").splitlines()
    assert shown[0].startswith(f"[1] {title} (score " if title else "[1] (score ") and shown[1] == "Otters  sleep."
