"""Assembly of self-contained HTML pages that run only their own scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SHARED = Path(__file__).parent / "shared_page"  # head and style of all pages


def read_static(folder: Path, names: Sequence[str]) -> str:
    """Return static text files of a page, joined by line breaks."""
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def render_page(template: str, *, title: str, style: str, script: str = "", data: Any = None, **parts: str) -> str:
    """Fill a template; its content security policy admits only this style and script, by their hashes."""
    style = f"{read_static(_SHARED, ['base.css'])}\n{style}"
    policy = (
        f"default-src 'none'; script-src {_hash(script) if script else chr(39) + 'none' + chr(39)}; "
        f"style-src {_hash(style)}; img-src data:; connect-src 'none'; base-uri 'none'; form-action 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )
    texts = {"TITLE": html.escape(title), "POLICY": policy, "STYLE": style, "SCRIPT": script}
    texts |= {"DATA": inert_json(data), **parts}
    template = template.replace("%HEAD%", read_static(_SHARED, ["head.html"]))
    return re.sub("|".join(f"%{name}%" for name in texts), lambda found: texts[found[0].strip("%")], template)


def inert_json(data: Any) -> str:
    """Encode ASCII JSON that cannot close or comment out its HTML element; lone surrogates survive."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
