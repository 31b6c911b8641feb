"""Measure and check the prose of the repository: docstrings, comments, error messages and pages.

Run ``python .ci/prose.py`` for counts and ``python .ci/prose.py --check [PATH ...]`` for findings, a line each.
The rules are in ``docs/contributing.md``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("torchrl_rloo", "sota_implementations", "tutorials", "benchmarks", "setup.py", "test")
CODE += tuple(f"docs/{name}.py" for name in ("conf", "curves", "generate", "pictures", "timeline"))
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "benchmarks", "tutorials")
MAX_WORDS = 25

# Verbs that may open the docstring of a function. Add to the list what is one.
VERBS = frozenset(
    """
    abandon abort accept accumulate acknowledge activate adapt add admit advance aggregate allocate allow answer append
    apply approve arrange ask assemble assert assign attach attend average await balance batch begin bind block bound
    break bring broadcast build bundle cache calculate calibrate call cancel cap carry cast catch center change charge
    chat check choose chunk claim clamp clean clear clip clone close collapse collate collect color combine compact
    compare compile complete compose compress compute concatenate configure confirm connect consume contain continue
    convert copy correct count cover crash create cut deal debit decide declare decode decrease define delay delete
    deliver derive describe deserialize detach detect determine die differ disable discard discount dispatch display
    distribute divide do double download drain draw drive drop dump duplicate edit embed emit empty enable encode end
    enforce ensure enter enumerate escape estimate evaluate evict exchange exclude execute exercise exit expand expect
    expire explain expose extend extract fail fall feed fetch fill filter find finish fit fix flag flatten flip flush
    fold follow force forecast forget fork format forward free freeze gather generate get give go grade group grow guard
    guess halve hand handle hash help hide hold identify ignore import include increase increment index infer inherit
    initialize inject insert inspect install instantiate interpolate interrupt invert isolate issue iterate join judge
    keep kill label launch learn leave let lift limit list listen load locate lock log look lose lower make map mark
    mask match mean measure merge minimize mirror mix model modify move multiply mute name narrow normalize note notify
    number observe offer omit open order overlap overwrite own pack pad pair parse partition pass patch pause permit
    pick pickle pin place play plot poll pop populate post predict prefer prefill prepare prepend present preserve
    prevent print process produce project propagate prove provide prune publish pull purge push put quantize query queue
    quote raise rank read reap rebuild recall receive recompute reconnect record recover recycle reduce refer refill
    refresh refuse register regroup reject relabel release reload remember remove rename render reorder repeat replace
    replay reply report represent request requeue require rerun reset reshape resize resolve respond restart restore
    restrict resume retain retry return reuse reverse revert reward rewind rewrite roll rotate round route run sample
    save say scale scan schedule score search seed select send separate serialize serve set settle shape shard share
    shift shorten show shrink shuffle shut signal simulate skip sleep slice snapshot solve sort spawn specify spell
    split spread stack start state step stop store stream strike strip submit subtract suggest sum summarize supply
    suspend swap switch synchronize take target teach tear tell terminate test throw tie time tokenize top trace track
    train transfer transform translate transpose treat trim truncate try turn undo unify unpack unpickle unregister
    update upload use validate verify vote wait wake walk warm warn watch weigh weight whiten withdraw withhold wrap
    write yield zero
    """.split()
)
WEAK = frozenset(
    "what which where how of by all that whose whether when who why".split()
)  # words that open no docstring

# Words and phrases that the house does not use, and those it uses instead.
BANNED = {
    r"in force": "current",
    r"(brought|brings?|bring) (it |them )?back": "restart, restore",
    r"under way": "in flight, running",
    r"anew": "again",
    r"beside": "next to, in addition to",
    r"gives? up": "cancel, stop",
    r"so many": "N, this many",
    r"meanwhile": "(drop)",
    r"who(so)?ever|whichever|whatsoever": "(say who)",
    r"(of|on) (its|their) own": "(drop), separate",
    r"(is|are) no (setting|choice|option)": "unknown",
    r"cannot be had|to be had": "unavailable, missing",
    r"has no use": "is ignored",
    r"goes on": "continues",
    r"torn": "failed",
    r"for want of": "without",
    r"asked? for": "request",
    r"nobody|anybody": "no one, (say who)",
    r"thus|hence|thereby|therein|thereof|whereby|wherein|hitherto": "so, (drop)",
    r"puts? (in|into) force": "activate",
    r"colou?red by|behaviours?|colours?|favours?|neighbours?|honours?|grey|centre[ds]?|centring": "American spelling",
    r"(normal|serial|token|regular|initial|optim|minim|maxim|summar|recogn|organ|synchron)is(e|es|ed|ing|ation|er)":
        "American spelling: -ize",
    r"(penal|real|general|quant|util)is(e|es|ed|ing|ation|er)": "American spelling: -ize",
    r"(label|model|travel|signal)l(ed|ing)|judgement|artefacts?|whilst|amongst|learnt": "American spelling",
}  # fmt: skip
BANNED_PATTERN = re.compile(r"\b(" + "|".join(f"(?:{p})" for p in BANNED) + r")\b", re.IGNORECASE)
NOT_PROSE = re.compile(r"\s*(\||[=+-]{3,})|.*\S {2,}\S")  # borders, columns of tables and of lists of commands
TOO = re.compile(r",? too[.;:,)]")


@dataclass(frozen=True)
class Text:
    """A piece of prose: where it stands, what kind it is, and its words."""

    path: Path
    line: int
    kind: str  # module, class, function, property, comment, string, page
    text: str
    name: str = ""


def python_files(paths: tuple[str, ...] | list[str] = CODE) -> Iterator[Path]:
    """Yield the Python files below ``paths``, without those of environments and builds."""
    for path in (ROOT / p for p in paths):
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []


@cache
def walk(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a Python file that hold prose: definitions and strings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.JoinedStr)
    nodes = ast.walk(ast.parse(path.read_text()))
    return tuple(n for n in nodes if isinstance(n, kinds) or isinstance(n, ast.Constant) and isinstance(n.value, str))


def read_docstrings(path: Path) -> Iterator[Text]:
    """Yield the docstrings of a Python file."""
    for node in walk(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Text(path, node.body[0].lineno, _kind(node), text, getattr(node, "name", path.stem))


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    decorators = {ast.unparse(d).split("(")[0].rsplit(".", 1)[-1] for d in node.decorator_list}
    return "property" if decorators & {"property", "cached_property", "setter", "tool", "fixture"} else "function"


def read_comments(path: Path) -> Iterator[Text]:
    """Yield the comments of a Python file, those on consecutive lines joined."""
    block: list[str] = []
    start = last = column = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#!", "# noqa", "# fmt", "# type", "# %%")):
            if block and token.start[0] == last + 1 and token.start[1] == column:
                block.append(token.string.lstrip("# "))
            else:
                if block:
                    yield Text(path, start, "comment", " ".join(block))
                block, start, column = [token.string.lstrip("# ")], token.start[0], token.start[1]
            last = token.start[0]
    if block:
        yield Text(path, start, "comment", " ".join(block))


def read_messages(path: Path) -> Iterator[Text]:
    """Yield the strings of a Python file that are sentences: messages, help texts, log lines."""
    docstrings = {
        id(node.body[0].value)
        for node in walk(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    parts = {id(value) for node in walk(path) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in walk(path):
        if isinstance(node, ast.JoinedStr):
            text = "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
            text = node.value
        else:
            continue
        if text.count(" ") >= 3:
            yield Text(path, node.lineno, "string", text)


def read_page(path: Path) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown file, without code blocks, tables and HTML."""
    block: list[str] = []
    start, fence = 1, ""
    for number, line in enumerate([*path.read_text().splitlines(), ""], start=1):
        mark = re.match(r"\s*(`{3,}|~{3,})", line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark[1]
            line = ""
        elif fence or re.match(r"\s*(\||<|#)", line):
            line = ""
        if block and (not line.strip() or re.match(r"\s*([-*]|\d+\.)\s", line)):
            yield Text(path, start, "page", " ".join(block))
            block = []
        if line.strip():
            start = start if block else number
            block.append(line.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring or paragraph, without code, tables, equations and argument lists' names."""
    paragraphs: list[str] = [""]
    indent_of_code = None
    in_doctest = False
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        in_doctest = line.lstrip().startswith((">>>", "...")) or (in_doctest and bool(line.strip()))
        if indent_of_code is not None and line.strip() and indent <= indent_of_code:
            indent_of_code = None
        if not line.strip() or in_doctest or indent_of_code is not None or NOT_PROSE.match(line):
            paragraphs.append("")
        elif re.match(r"\s*([\w.*`/, ()\[\]|-]{1,80}: |[-*] |\d+\. |.*:$)", line):  # an argument, an item, a heading
            paragraphs.append(re.sub(r"^\s*[\w.*`/, ()\[\]|-]{1,80}: ", "", line).strip() + " ")
        else:
            paragraphs[-1] += line.strip() + " "
        if line.rstrip().endswith("::"):
            indent_of_code = indent
    for paragraph in paragraphs:
        plain = re.sub(r"`+[^`]*`+|\$[^$]*\$|\]\([^)]*\)|\{\w+\}`[^`]*`", "X", paragraph)
        yield from (s.strip() for s in re.split(r"(?<=[.!?:;])\s+", plain) if s.strip())


def check(text: Text) -> Iterator[str]:
    """Yield what the house rules say against a piece of prose, one line a finding."""
    where = f"{text.path.relative_to(ROOT)}:{text.line}"
    prose = re.sub(r"^\s*(>>>|\.\.\.).*$|`+[^`]*`+", "X", text.text, flags=re.MULTILINE)
    prose = text.text if text.kind == "string" else prose
    for match in BANNED_PATTERN.finditer(prose):
        better = next(v for p, v in BANNED.items() if re.fullmatch(p, match[0], re.IGNORECASE))
        yield f"{where}: {match[0]!r} -> {better}"
    if text.kind != "string" and TOO.search(prose):
        yield f"{where}: drop the trailing 'too' or say 'also'"
    if text.kind in {"module", "class", "function", "property"}:
        yield from (f"{where}: {problem}" for problem in check_opening(text))
    if text.kind in {"module", "class", "function", "property", "comment", "page"}:
        for sentence in sentences(text.text):
            words = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
            if words > MAX_WORDS:
                yield f"{where}: {words} words in a sentence, at most {MAX_WORDS}: {sentence[:70]}..."


def check_opening(text: Text) -> Iterator[str]:
    """Yield what is wrong with the first line of a docstring."""
    first = opening(text)
    line = text.text.splitlines()[0]
    if first in WEAK:
        yield f"{text.kind} {text.name} opens with {first!r}: {line[:70]}"
    elif text.kind == "function" and first not in VERBS and not text.name.startswith(("__", "test_")):
        yield f"{text.name}() opens with {first!r}, not with an imperative verb: {line[:70]}"


def opening(text: Text) -> str:
    """Return the first word of a docstring, in lower case."""
    match = re.match(r"\W*([\w'-]+)", text.text)
    return match[1].lower() if match else ""


def count(paths: list[str]) -> None:
    """Print how docstrings open, by kind, and how many lines are docstrings and comments."""
    texts = [t for path in python_files(paths) for t in read_docstrings(path)]
    for kind in ("module", "class", "function", "property"):
        words = Counter(opening(t) for t in texts if t.kind == kind)
        total = sum(words.values()) or 1
        shares = {
            "imperative": sum(n for w, n in words.items() if w in VERBS),
            "What/Which/How/Of/By": sum(n for w, n in words.items() if w in WEAK),
            "article": sum(n for w, n in words.items() if w in {"a", "an", "the"}),
        }
        print(f"{kind:9} {total:5}  " + "  ".join(f"{k} {100 * v / total:5.1f} %" for k, v in shares.items()))
    lines = sum(path.read_text().count("\n") for path in python_files(paths))
    docs = sum(t.text.count("\n") + 1 for t in texts)
    comments = headings = 0
    for path in python_files(paths):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                comments += 1
                headings += not token.line[: token.start[1]].strip()
    print(f"lines {lines}, docstrings {docs}, comments {comments}, on separate lines {headings}")


def findings(paths: list[str] | None = None) -> list[str]:
    """Return every finding in ``paths``, or in the whole repository."""
    found = []
    for path in python_files(paths or CODE):
        is_test = path.is_relative_to(ROOT / "test")  # strings of tests are data
        for read in (read_docstrings, read_comments, *(() if is_test else (read_messages,))):
            found += [f for text in read(path) for f in check(text)]
    for root in (ROOT / p for p in (paths or PAGES)):
        pages = sorted(root.rglob("*.md")) if root.is_dir() else [root] if root.suffix == ".md" else []
        found += [f for page in pages if "_build" not in page.parts for text in read_page(page) for f in check(text)]
    return found


def main() -> int:
    """Run the command line; return 1 where the check has findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files and folders; the whole repository without them")
    parser.add_argument("--check", action="store_true", help="print findings instead of counts")
    args = parser.parse_args()
    if not args.check:
        count(args.paths or ["torchrl_rloo"])
        return 0
    found = findings(args.paths)
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
