"""Page of transcripts in a real browser: display, clicks and keys, and completions as inert text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from torchrl_rloo.data import keys
from torchrl_rloo.data.rows import stack_rows
from torchrl_rloo.data.stop_reasons import STOP_REASONS
from torchrl_rloo.data.templates import answer_turn, encode_prompt
from torchrl_rloo.diagnostics import transcripts
from torchrl_rloo.diagnostics.transcripts import write_transcripts
from torchrl_rloo.embedded import build_tokenizer

ATTACKS = [
    "</script><script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1><svg onload=window.pwned=1>",
    "<!--<script>",
    "[x](javascript:window.pwned=1) javascript:window.pwned=1",
    "abc\u202edef\u2066ghi",
    "nul\x00 bell\x07 \x1b[31mred\x1b[0m",
    "\u2028\u2029%DATA%%SCRIPT%",
    "</textarea></title></style><base href=//evil.example><meta http-equiv=refresh content=0>",
    "a" + "\n" * 300 + " " * 500 + "b",
    "e\u0301\u200d\U000e0041 \U0001f600 \u0634\u0643\u0631\u0627",
]


def conversation(tokenizer, asked: str, turns: list[tuple[str, str | None]], place: int, group: int, reward: float):
    """Build a finished row from turns of policy text and tool result, with synthetic numbers."""
    query = [{"role": "user", "content": asked}]
    ids, mask, completion = encode_prompt(tokenizer, query), [], []
    mask += [False] * len(ids)
    prompt = len(ids)
    for said, answered in turns:
        new = [*tokenizer(said)["input_ids"], tokenizer.eos_token_id]
        ids, mask = ids + new, mask + [True] * len(new)
        completion.append({"role": "assistant", "content": said})
        if answered is not None:
            feedback = [{"role": "tool", "content": answered, "name": "calculator"}]
            new = answer_turn(tokenizer, [*query, *completion], feedback, last_token=ids[-1]).ids
            ids, mask, completion = ids + new, mask + [False] * len(new), completion + feedback
    flags = torch.tensor(mask)
    log_probs = -torch.linspace(0, 6, len(ids)) * flags
    row = TensorDict({keys.TOKENS: torch.tensor(ids), keys.PROMPT_TOKENS: torch.tensor(ids[:prompt])})
    row.set(keys.ACTION_MASK, flags).set(keys.LOG_PROBS, log_probs).set(keys.REF_LOG_PROBS, log_probs - 0.5 * flags)
    row.set(keys.GROUP_ID, torch.tensor(group)).set(keys.NUM_TURNS, torch.tensor(len(turns)))
    row.set(keys.POLICY_VERSION, torch.tensor(7)).set(keys.REWARD, torch.full((1, 1), reward))
    row.set(keys.REWARDS, torch.tensor([reward, float("nan")])).set(keys.ADVANTAGE, torch.full((1, 1), reward - 0.5))
    reason = "answered" if place % 3 else "turn_tokens"
    row.set(keys.STOP_REASON, torch.tensor(list(STOP_REASONS).index(reason)))
    row.set(keys.QUERY, NonTensorData(query)).set(keys.COMPLETION, NonTensorData(completion))
    return row.set("answer", NonTensorData(str(place)))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Twelve conversations in groups of three: rewards 0 to 1.1, tool calls in every other, one tool error."""
    tokenizer, rows = build_tokenizer(), []
    for i in range(12):
        call = ("<tool>2*3</tool>", "Error: no such tool" if i == 4 else "6")
        turns = [call, ("so it is 6\u00b0", None)] if i % 2 == 0 else [("I guess 7", None)]
        rows.append(conversation(tokenizer, f"What is 2*3, please? ({i // 3})", turns, i, i // 3, i / 10))
    path = tmp_path_factory.mktemp("pages") / "page.html"
    return write_transcripts(path, stack_rows(rows), tokenizer, title="A <b>title", reward_names=["right", "short"])


def listed(browser) -> list[int]:
    return browser.js("[...document.querySelectorAll('#list td.place')].map((cell) => Number(cell.textContent))")


def test_shows_a_conversation_as_it_was(browser, page):
    browser.open(page, "#row=4")
    assert browser.js("document.title") == browser.js("document.querySelector('h1').textContent") == "A <b>title"
    heads = browser.js("[...document.querySelectorAll('.block h3')].map((head) => head.textContent)")
    assert heads == ["user", "assistant, turn 1", "tool", "assistant, turn 2"]
    assert browser.js("document.querySelector('.call').textContent") == "tool call<tool>2*3</tool>"
    assert browser.js("document.querySelector('.block.failed .name').textContent") == "calculator"
    shown = browser.js("[...document.querySelectorAll('.block.sampled .action')].map((t) => t.textContent).join('')")
    assert shown == "<tool>2*3</tool><|im_end|>so it is 6c2\u00b0<|im_end|>"  # c2: the first byte of the degree sign
    facts = browser.js("document.querySelector('#transcript > .facts').textContent")
    assert "right0.400" in facts and "shortabstained" in facts and "answer4" in facts
    assert browser.complaints() == []


def test_tells_of_a_token_under_the_pointer_and_in_focus(browser, page):
    browser.open(page, "#row=4")
    browser.mouse("#transcript .token.action", "mouseMoved")
    browser.wait("!document.getElementById('tip').hidden")
    text = browser.js("document.getElementById('tip').textContent")
    for fact in ("sampled by the policy", "advantage\u22120.1", "policy version7", "log-ratio to reference+0.5"):
        assert fact in text
    place, tokens = browser.js("rows[4].parts[0].mask[1][0]"), browser.js("rows[4].tokens")
    facts = dict(browser.js(f"tokenFacts(rows[4], rows[4].parts[0], {place})"))
    assert float(facts["log-prob"].replace("\u2212", "-")) == pytest.approx(-6 * place / (tokens - 1), abs=1e-4)
    assert float(facts["probability"]) == pytest.approx(math.exp(-6 * place / (tokens - 1)), abs=1e-4)
    browser.js("document.querySelector('.token').focus()")
    assert "context: not sampled" in browser.js("document.getElementById('tip').textContent")
    browser.press("ArrowRight")
    assert browser.js("document.activeElement.dataset.i") == "1"
    assert browser.js("document.activeElement.getAttribute('aria-describedby')") == "tip"
    browser.press("Escape")
    assert browser.js("document.getElementById('tip').hidden")
    assert browser.complaints() == []


def test_log_probs_of_another_model_are_compared(browser, page, tmp_path):
    browser.open(page, "#row=4")
    assert browser.js("[...byId('color').options].map((o) => o.value)") == ["log_probs", "advantage", "mask"]
    tokenizer = build_tokenizer()
    row = conversation(tokenizer, "What is 2*3?", [("six", None)], 0, 0, 1.0)
    change = torch.linspace(-1.5, 1.5, len(row[keys.TOKENS])) * row[keys.ACTION_MASK]
    row.set(keys.PROXIMAL_LOG_PROBS, row[keys.LOG_PROBS] + change)
    browser.open(write_transcripts(tmp_path / "page.html", stack_rows([row]), tokenizer), "#row=0")
    browser.js("byId('color').value = 'change', byId('color').dispatchEvent(new Event('change'))")
    assert browser.js("document.body.dataset.color") == "change" and "-1" in browser.js(
        "byId('legend').textContent"
    ).replace("\u2212", "-")
    last = int(row[keys.ACTION_MASK].nonzero().max())
    facts = dict(browser.js(f"tokenFacts(rows[0], rows[0].parts[0], {last})"))
    assert float(facts["change of the log-prob"]) == pytest.approx(float(change[last]), abs=1e-4)
    rising = browser.js("document.querySelectorAll('#transcript .token.rise4').length")
    assert rising == int((change >= 1).sum()) > 0
    assert browser.js("document.querySelectorAll('#transcript .token:not(.action).rise4').length") == 0
    assert browser.complaints() == []


def test_filters(browser, page):
    browser.open(page)
    assert listed(browser) == list(range(12)) and "12 of 12" in browser.js("found.textContent")
    browser.fill("#lowest", "0.35")
    browser.fill("#highest", "0.8")
    browser.wait("found.textContent.startsWith('5 of')")
    assert listed(browser) == [4, 5, 6, 7, 8]
    browser.click("#filters button[type=reset]")
    browser.wait("found.textContent.startsWith('12 of')")
    browser.click("#errors")
    browser.wait("found.textContent.startsWith('1 of')")
    assert listed(browser) == [4]
    browser.click("#errors")
    browser.fill("#search", "GUESS 7")
    browser.wait("found.textContent.startsWith('6 of')")
    assert listed(browser) == [1, 3, 5, 7, 9, 11]
    browser.js("byId('stop').value = 'turn_tokens', byId('stop').dispatchEvent(new Event('input', {bubbles: true}))")
    browser.wait("found.textContent.startsWith('2 of')")
    assert listed(browser) == [3, 9]
    browser.fill("#search", " and nothing else")
    browser.wait("found.textContent.startsWith('0 of')")
    assert "No conversation" in browser.js("list.textContent")
    assert browser.complaints() == []


def test_order_keys_and_addresses(browser, page):
    browser.open(page, "#row=2")
    assert browser.js("document.querySelectorAll('#list th.group').length") == 4
    browser.click("#heads .reward button")
    browser.wait("document.querySelector('#heads .reward').getAttribute('aria-sort') === 'descending'")
    assert listed(browser) == list(range(11, -1, -1))
    assert browser.js("document.querySelectorAll('#list th.group').length") == 0
    browser.press("j")
    browser.wait("location.hash === '#row=1'")
    browser.press("k")
    browser.press("k")
    browser.wait("location.hash === '#row=3'")
    assert browser.js("document.querySelector('tr[aria-current] td').textContent") == "3"
    browser.click("#list td.snippet a")
    browser.wait("location.hash === '#row=11' && transcript.textContent.includes('Conversation #11')")
    browser.js("location.hash = '#row=5'")
    browser.wait("transcript.textContent.includes('Conversation #5')")
    browser.press("/")
    assert browser.js("document.activeElement.id") == "search"
    browser.press("j")
    assert browser.js("location.hash") == "#row=5" and browser.js("search.value") == "j"
    assert browser.complaints() == []


def test_group_side_by_side(browser, page):
    browser.open(page, "#row=4")
    browser.press("g")
    browser.wait("document.querySelectorAll('.card').length === 3")
    assert browser.js("location.hash") == "#row=4&view=group"
    text = browser.js("[...document.querySelectorAll('.card .facts')].map((facts) => facts.textContent)")
    assert [t.split("ended")[0] for t in text] == [
        f"reward{r:.3f}advantage{a}" for r, a in ((0.3, "\u22120.200"), (0.4, "\u22120.100"), (0.5, "0"))
    ]
    assert browser.js("document.querySelector('.card[aria-current] a').textContent") == "Conversation #4"
    assert browser.js("transcript.querySelectorAll('.block[data-role=user]').length") == 1
    browser.press("g")
    browser.wait("location.hash === '#row=4' && !document.querySelector('.card')")
    assert browser.complaints() == []


def test_colors(browser, page):
    browser.open(page, "#row=0")
    backgrounds = "new Set([...document.querySelectorAll('.{}')].map((t) => getComputedStyle(t).backgroundColor)).size"
    assert browser.js(backgrounds.format("token:not(.special)")) >= 3
    browser.js("color.value = 'mask', color.dispatchEvent(new Event('change'))")
    assert browser.js(backgrounds.format("token:not(.special)")) == 2  # sampled or not
    assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_both_schemes(browser, page, dark):
    """Text has a contrast of at least 4.5 on its background, for tokens of every shade."""
    browser.open(page, "#row=0", dark=dark)
    worst = browser.js(CONTRAST)
    assert worst > 4.5
    browser.js("color.value = 'advantage', color.dispatchEvent(new Event('change'))")
    assert browser.js(CONTRAST) > 4.5


CONTRAST = """(() => {
  const canvas = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const paint = (...colors) => {
    for (const color of colors) (context.fillStyle = color), context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((c) => {
      const s = c / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
  };
  const luminance = ([r, g, b]) => 0.2126 * r + 0.7152 * g + 0.0722 * b;
  const texts = document.querySelectorAll(".token, .shade, .size, .answered, #found, .tile-name, td");
  return Math.min(...[...texts].map((shown) => {
    const grounds = [];
    for (let e = shown; e; e = e.parentElement) grounds.unshift(getComputedStyle(e).backgroundColor);
    const [a, b] = [paint(...grounds), paint(getComputedStyle(shown).color)].map(luminance);
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }));
})()"""


def test_a_narrow_screen_shows_list_or_conversation(browser, page):
    browser.open(page, width=400, height=800)
    seen = "['panel', 'transcript'].filter((id) => byId(id).offsetWidth)"
    assert browser.js(seen) == ["panel"]
    browser.click("#list td.snippet a")
    browser.wait("document.body.dataset.pane === 'transcript'")
    assert browser.js(seen) == ["transcript"]
    assert browser.js("document.documentElement.scrollWidth") <= 400
    browser.click("#to-list")
    assert browser.js(seen) == ["panel"]


SAMPLED = """(() => {
  const [part] = selected.parts;
  const { ids, order } = numbers(selected, part);
  return [...ids.keys()].filter((i) => order[i] >= 0).map((i) => tokenText(part, ids, i)).join("");
})()"""


def test_completions_stay_text(browser, tmp_path):
    tokenizer = build_tokenizer()
    rows = [conversation(tokenizer, a, [("<tool>1</tool>", a), (a, None)], i, 0, 1.0) for i, a in enumerate(ATTACKS)]
    for row, attack in zip(rows, ATTACKS, strict=True):
        row.set("answer", NonTensorData({attack: attack, "__proto__": "\ud800", "constructor": [attack]}))
        row.set(keys.TASK, NonTensorData(attack))
    half = rows[0].clone()
    half[keys.TOKENS][-3:] = torch.tensor(tokenizer.convert_tokens_to_ids(["\u00f0", "\u00ff", "\u00e2"]))
    half.set(keys.COMPLETION, NonTensorData([{"role": "assistant", "content": "\ud83d alone"}]))
    half.set(keys.TASK, NonTensorData("\udc00"))
    page = write_transcripts(
        tmp_path / "attacks.html",
        [*rows, half],
        tokenizer,
        title=ATTACKS[0] + "\ud800",
        settings=dict.fromkeys(ATTACKS, ATTACKS),
        reward_names=ATTACKS[:2],
    )
    browser.open(page)
    assert browser.js("document.scripts.length") == 2
    for i, attack in enumerate(ATTACKS):
        browser.js(f"location.hash = '#row={i}'")
        browser.wait(f"transcript.textContent.includes('Conversation #{i},')")
        assert (
            browser.js(
                "document.querySelectorAll('#transcript :is(img, script, svg, base, meta, style, iframe)').length"
            )
            == 0
        )
        said = browser.js(SAMPLED)
        assert said == f"<tool>1</tool><|im_end|>{attack}<|im_end|>"
        browser.js("document.querySelector('.token.action').focus()")
    browser.js("location.hash = '#row=4'")
    browser.wait("transcript.textContent.includes('U+202E')")
    assert not browser.js("/[\\u202e\\u2066\\u0000\\u001b]/.test(document.body.innerText)")
    browser.js("location.hash = '#row=10&view=group'")
    browser.wait("document.querySelectorAll('.card').length === 11")
    assert browser.complaints() == []


def test_the_page_itself_would_be_stopped(browser, page):
    """The content security policy stops the page's own script from adding markup and code."""
    browser.open(page)
    assert (
        browser.js("(() => { try { document.body.innerHTML = '<b>'; } catch (error) { return error.name; } })()")
        == "TypeError"
    )
    browser.js("document.body.append(Object.assign(document.createElement('img'), {src: 'https://a.example/'}))")
    browser.wait("violations.some((directive) => directive.startsWith('img-src'))")


def test_hundreds_of_long_conversations(browser, tmp_path, monkeypatch):
    """Only the chosen conversation is in the document."""
    tokenizer = build_tokenizer()
    long = conversation(tokenizer, "What is 2*3?", [("the answer is " * 150, None)] * 2, 1, 0, 1.0)
    rows = [long.clone().set(keys.GROUP_ID, torch.tensor(i // 8)) for i in range(400)]
    monkeypatch.setattr(transcripts, "MAX_ROWS", 300)
    page = write_transcripts(tmp_path / "many.html", rows, tokenizer)
    browser.open(page, "#row=299")
    assert "300 of 300 conversations (100 more were not written)" in browser.js("found.textContent")
    assert browser.js("document.querySelectorAll('#transcript .token').length") == len(long[keys.TOKENS])
    assert page.stat().st_size < 300 * len(long[keys.TOKENS]) * 20
