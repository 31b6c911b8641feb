"""Fuzz of the transcripts and the report in a real browser: hostile text in every field stays text.

One browser loads one page of each kind with all texts. Nothing runs, is requested, or becomes an element or attribute.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from matplotlib.image import imsave
from tensordict import NonTensorData, TensorDict

from torchrl_rloo.data import keys
from torchrl_rloo.data.templates import answer_turn, encode_prompt
from torchrl_rloo.diagnostics import write_report
from torchrl_rloo.diagnostics.transcripts import write_transcripts
from torchrl_rloo.embedded import build_tokenizer

# "attacked" marks every text; a page that made an element or attribute of one would have it there
SEEDS = [
    "</script><script>window.pwned='attacked'</script>",
    "<img src=x onerror=window.pwned=1 class=attacked>",
    "<svg/onload=window.pwned=1><animate onbegin=window.pwned=1 attributeName=attacked>",
    "<iframe srcdoc='<script>parent.pwned=1</script>' name=attacked>",
    "<a href=javascript:window.pwned=1 id=attacked>attacked</a>",
    "<style>@import 'http://attacked.example/';*{display:none}</style>",
    "<link rel=stylesheet href=http://attacked.example/><base href=//attacked.example>",
    "<meta http-equiv=refresh content='0;url=http://attacked.example'>",
    "<form action=//attacked.example id=list><input name=attacked><button>",
    "<!--attacked",
    "--><b class=attacked>",
    "]]><b class=attacked>",
    "<![CDATA[attacked",
    "<?attacked",
    '" onmouseover=window.pwned=1 attacked="',
    "' autofocus onfocus=window.pwned=1 attacked='",
    "` attacked=`",
    "&lt;img src=x class=attacked&gt; &#60;b class=attacked&#62; &amp;attacked;",
    "</textarea></title></style></noscript></template><b class=attacked>",
    "<template><b class=attacked>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1 class=attacked>",
    "${window.pwned=1}attacked",
    "{{constructor.constructor('window.pwned=1')()}}attacked",
    "%DATA%%SCRIPT%%POLICY%%SECTIONS%attacked",
    "javascript:window.pwned=1//attacked",
    "data:text/html,<script>window.pwned=1</script>attacked",
    "url(http://attacked.example/)",
    "__proto__",
    "constructor",
    "toString",
    "hasOwnProperty",
    "attacked\u2028\u2029\u202e\u2066",
    "attacked\x00\x1b\x07\x7f",
    "\ud800attacked\udfff",
    "\ufeffattacked",
    "attacked\r\n\r<b class=attacked>",
    "<\u0130mg class=attacked>",
    "<\x00script>window.pwned=1</script>attacked",
    "attacked" * 400,
]


def texts(count: int, seed: int) -> list[str]:
    """Return the seeds, and random joins and cuts of them."""
    rng = random.Random(seed)
    found = list(SEEDS)
    while len(found) < count:
        a, b = rng.sample(SEEDS, 2)
        found.append(
            a[: rng.randrange(len(a) + 1)]
            + rng.choice(("", "\n", "<", "'", '"', "\\", "\0"))
            + b[rng.randrange(len(b)) :]
        )
    return found


def hostile_row(tokenizer, text: str, number: int) -> TensorDict:
    """Build a finished conversation with a text in every field."""
    query = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    ids = encode_prompt(tokenizer, [{"role": "user", "content": "?"}])
    prompt, said = len(ids), tokenizer(f"<tool>{text}</tool>".encode("utf-8", "replace").decode())["input_ids"]
    ids += [*said, tokenizer.eos_token_id]
    mask = [False] * prompt + [True] * (len(ids) - prompt)
    completion = [{"role": "assistant", "content": text}, {"role": "tool", "content": text, "name": text}]
    completion.append({"role": text, "content": text, "tool_calls": [{"function": {"name": text, "arguments": text}}]})
    feedback = answer_turn(tokenizer, query[1:], [{"role": "tool", "content": "x"}], last_token=ids[-1]).ids
    ids, mask = ids + feedback, mask + [False] * len(feedback)
    row = TensorDict({keys.TOKENS: torch.tensor(ids), keys.PROMPT_TOKENS: torch.tensor(ids[:prompt])})
    row.set(keys.ACTION_MASK, torch.tensor(mask)).set(keys.LOG_PROBS, -torch.rand(len(ids)))
    row.set(keys.GROUP_ID, torch.tensor(number // 4)).set(keys.REWARD, torch.full((1, 1), 0.5))
    row.set(keys.REWARDS, torch.tensor([0.5, float("nan")])).set(keys.ADVANTAGE, torch.full((1, 1), 0.1))
    row.set(keys.QUERY, NonTensorData(query)).set(keys.COMPLETION, NonTensorData(completion))
    row.set(keys.TASK, NonTensorData(text)).set("answer", NonTensorData({text: [text, {text: text}]}))
    return row.set("file", NonTensorData(f"../{text}")).set("id", NonTensorData(text))


def foreign_marks(browser) -> list[str]:
    """Return elements and attributes that only a text can have made."""
    return browser.js(
        """[...document.querySelectorAll('*')].filter((e) => !['title', 'script'].includes(e.localName)).flatMap((e) =>
        [e.localName, ...[...e.attributes].flatMap((a) => [a.name, ['id', 'class', 'name', 'src', 'href', 'style',
        'action'].includes(a.name) || a.name.startsWith('on') ? a.value : ''])]).filter((text) =>
        text.includes('attacked') || text.includes('pwned'))"""
    )


TAGS = "img, iframe, object, embed, link, base, svg, math, style ~ style, a[href^=javascript]"
FORBIDDEN = f"document.querySelectorAll('{TAGS}').length"


def test_transcripts_of_hostile_texts(browser, tmp_path):
    tokenizer, attacks = build_tokenizer(), texts(80, seed=1)
    rows = [hostile_row(tokenizer, text, number) for number, text in enumerate(attacks)]
    page = write_transcripts(
        tmp_path / "'\"><b class=attacked>.html",
        rows,
        tokenizer,
        title=SEEDS[0],
        settings={text: {text: [text]} for text in attacks},
        reward_names=SEEDS[:2],
    )
    browser.open(page)
    assert browser.js("document.scripts.length") == 2 and browser.js(FORBIDDEN) == 0
    assert browser.js("document.querySelectorAll('#list td.place').length") == len(attacks)
    whole = browser.js("document.querySelectorAll('body > *').length")
    for number, text in enumerate(attacks):
        browser.js(f"location.hash = '#row={number}'")
        browser.wait(f"transcript.textContent.includes('Conversation #{number},')")
        browser.js("document.querySelector('.token.action').focus()")
        assert foreign_marks(browser) == [] and browser.js(FORBIDDEN) == 0, text
        # The text itself is shown, where the page shows it unchanged
        plain = "".join(c for c in text if c.isascii() and c.isprintable())
        if plain == text and len(text) < 400:
            assert browser.js(f"transcript.textContent.includes({text!r})") or text in ("__proto__",), text
    browser.js("location.hash = '#row=4&view=group'")
    browser.wait("document.querySelectorAll('.card').length === 4")
    browser.js("document.querySelector('#settings').open = true")
    for text in ("attacked", "<img src=x", "'\"`", "\\", "(.*", "__proto__"):
        browser.js(
            f"byId('search').value = {text!r}, byId('search').dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        browser.wait("found.textContent.includes(' of ')")
    browser.js("byId('task').selectedIndex = 5, byId('task').dispatchEvent(new Event('input', {bubbles: true}))")
    assert foreign_marks(browser) == [] and browser.js(FORBIDDEN) == 0
    assert browser.js("document.querySelectorAll('body > *').length") == whole
    assert browser.complaints() == []


@pytest.mark.parametrize(
    "address",
    ["#row=<img src=x>", "#row=__proto__&view=group", "#row=1e9", "#row=-1&view=%00", "#%%%", "#" + "a=" * 5000],
)
def test_an_address_from_outside_breaks_nothing(browser, tmp_path, address):
    tokenizer = build_tokenizer()
    page = write_transcripts(
        tmp_path / "page.html", [hostile_row(tokenizer, "attacked", i) for i in range(2)], tokenizer
    )
    browser.open(page, address, ready="document.querySelectorAll('#list td.place').length === 2")
    assert foreign_marks(browser) == [] and browser.js(FORBIDDEN) == 0 and browser.complaints() == []


def report_page(folder: Path) -> Path:
    attacks = [text.encode("utf-8", "backslashreplace").decode() for text in texts(80, seed=2)]
    table = [
        {"step": step, text: text, "messages": [{"role": text, "content": text}]}
        for text in attacks[:4]
        for step in (1, 2)
    ]
    return write_report(
        folder,
        history=[{"step": step, "reward": 0.1 * step, SEEDS[0]: 1.0} for step in (1, 2)],
        summary={text: text for text in attacks} | {"nested": {text: [text, {text: text}] for text in attacks}},
        tables={text: table for text in attacks[:12]},
        definitions={SEEDS[0]: SEEDS[1]},
        panels=[[SEEDS[0]], ["reward"]],
        settings={text: text for text in attacks},
        figures={SEEDS[14]: folder / "figure.png", SEEDS[15]: folder / "figure.png"},
        title=SEEDS[0],
    )


def test_a_report_of_hostile_texts(browser, tmp_path):
    imsave(tmp_path / "figure.png", torch.zeros(2, 2))
    browser.open(report_page(tmp_path), ready="document.querySelector('h1')")
    assert browser.js("document.querySelector('h1').textContent") == browser.js("document.title") == SEEDS[0]
    assert foreign_marks(browser) == [] and browser.js("document.scripts.length") == 0
    assert (
        browser.js("[...document.images].map((i) => [i.src.slice(0, 15), i.naturalWidth > 0])")
        == [["data:image/png;", True]] * 2
    )
    assert browser.js("document.querySelectorAll('body > *').length") == 2
    cells = "document.querySelectorAll('section:last-of-type details th')"
    shown = browser.js(f"[...{cells}].map((cell) => cell.textContent)")
    assert len(shown) >= 60 and SEEDS[4] in shown
    assert browser.js("document.querySelectorAll('.chart svg').length") >= 1
    assert browser.complaints() == []


def test_the_report_itself_would_be_stopped(browser, tmp_path):
    """The content security policy stops scripts and requests that get into the page in any way."""
    page = write_report(tmp_path, history=[{"step": 1, "reward": 1.0}], summary={})
    inserted = "<script>window.pwned=1</script><img src='file:///x.png' onerror='window.pwned=1'><iframe src='file:///'></iframe>"
    page.write_text(page.read_text().replace("<h1>", f"{inserted}<h1>", 1))
    browser.open(page, ready="document.querySelector('h1')")
    browser.wait("violations.length >= 3")
    assert not browser.js("'pwned' in window")
    assert {directive.split("-")[0] for directive in browser.js("violations")} == {"script", "img", "frame"}
