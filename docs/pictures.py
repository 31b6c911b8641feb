"""Draw the diagrams of README and docs as SVG; ``python docs/pictures.py`` rewrites them below ``docs/pictures``.

Boxes carry their own light fill and dark text, and lines are mid-gray, so that a picture reads on white and on black.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
INK, LINE = "#1d2733", "#7a8694"
BLUE, GREEN, AMBER, ROSE, GRAY = "#d6e6fb", "#d5f0dc", "#fdebc8", "#fadadd", "#e6e9ee"

COLUMNS = {  # horizontal position of each folder in the module map, in pixels; its height follows from imports
    "run": 80, "cli": 80, "evaluation": 320, "diagnostics": 320, "collectors": 320, "envs": 320, "engines": 320,
    "functional": 400, "weight_update": 240, "data": 520, "rewards": 620, "modules": 520, "objectives": 620,
    "replay": 620, "training": 720, "embedded": 600, "ray": 490, "agents": 160, "runtime": 620, "sandbox": 760,
    "images": 580,
}  # fmt: skip
STAGES = (  # who acts, what it does, the keys of data/keys.py that it writes, fill
    ("DataLoadingPrimer", "draws a prompt and copies it once for each generation", ("QUERY", "GROUP_ID"), BLUE),
    ("ChatEnv.reset", "encodes the prompt with the chat template", ("PROMPT_TOKENS",), BLUE),
    ("policy", "samples a turn and records each token's log-prob", ("TOKENS", "ACTION_MASK", "LOG_PROBS"), GREEN),
    ("ChatEnv.step", "ends the row; feedback from a transform opens the next turn", ("STOP_REASON", "DONE"), BLUE),
    ("reward transforms", "score the finished trajectory", ("REWARDS", "REWARD", "REF_LOG_PROBS"), BLUE),
    ("LLMCollector", "delivers the finished groups of a step", ("POLICY_VERSION",), AMBER),
    ("MCAdvantage", "subtracts the mean of the other rewards of the group", ("ADVANTAGE",), ROSE),
    ("RLOOLoss", "scores the same ids again; ratio, clip, sum", (), ROSE),
    ("weight updater", "sends the new weights under a new version", (), GREEN),
)


class Picture:
    """An SVG under construction: boxes, lines and text at pixel positions."""

    def __init__(self, width: int, height: int, title: str):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="14">',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker></defs>',
        ]

    def box(self, x: int, y: int, w: int, h: int, text: str, fill: str, bold: bool = False) -> None:
        """Draw a filled box with centered text, a line for each line of ``text``."""
        self.parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{LINE}"/>')
        lines = text.split("\n")
        for i, line in enumerate(lines):
            top = y + h / 2 + 5 + (i - (len(lines) - 1) / 2) * 18
            self.text(x + w / 2, top, line, INK, "middle", bold and i == 0)

    def text(self, x: float, y: float, text: str, color: str = LINE, anchor: str = "start", bold: bool = False) -> None:
        """Write one line of text."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(f'<text x="{x}" y="{y}" fill="{color}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through ``points`` with a tip at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """Return the finished picture."""
        return "\n".join([*self.parts, "</svg>", ""])


def row_life() -> str:
    """Draw what happens to one row from the dataset to the weight update, and the keys that each part writes."""
    picture = Picture(880, 60 * len(STAGES) + 190, "The life of a row")
    for i, (who, what, names, fill) in enumerate(STAGES):
        y = 10 + 60 * i
        picture.box(110, y, 170, 40, who, fill, bold=True)
        picture.text(295, y + 17 if names else y + 26, what)
        if names:
            picture.text(295, y + 35, "writes " + ", ".join(map(key_text, names)))
        if i:
            picture.arrow((195, y - 20), (195, y - 1))
    top = 10 + 60 * len(STAGES)
    picture.arrow((110, 210), (90, 210), (90, 150), (109, 150))
    picture.text(86, 184, "next turn", anchor="end")
    picture.arrow((110, top - 40), (14, top - 40), (14, 30), (109, 30))
    picture.text(22, 304, "next step")
    _token_strip(picture, top + 20)
    return picture.svg()


def _token_strip(picture: Picture, top: int) -> None:
    picture.text(20, top, "One finished row of two turns, token by token:")
    spans = (("prompt", 200, GRAY), ("action", 190, GREEN), ("feedback", 150, GRAY), ("action", 160, GREEN))
    rows = (
        ("tokens", None),
        ("action mask", ("False", "True")),
        ("log-probs", ("0", "as sampled")),
        ("gradient", ("no", "yes")),
    )
    for i, (name, values) in enumerate(rows):
        x, y = 130, top + 14 + 32 * i
        picture.text(20, y + 19, name)
        for span, width, fill in spans:
            picture.box(x, y, width, 28, span if values is None else values[span == "action"], fill)
            x += width


def loop() -> str:
    """Draw the training loop with its parts, for the README."""
    picture = Picture(880, 220, "The training loop")
    picture.box(10, 20, 130, 56, "prompts", GRAY, bold=True)
    picture.box(190, 20, 200, 56, "environment\nturns, tools, rewards, KL", BLUE, bold=True)
    picture.box(480, 20, 200, 56, "policy\nTransformers or vLLM", GREEN, bold=True)
    picture.box(190, 150, 200, 56, "collector\nwhole groups of rows", AMBER, bold=True)
    picture.box(480, 150, 170, 56, "buffer\nadvantages", ROSE, bold=True)
    picture.box(700, 150, 170, 56, "loss, optimizer\nRLOO and others", ROSE, bold=True)
    picture.arrow((140, 48), (189, 48))
    picture.arrow((390, 40), (479, 40))
    picture.arrow((480, 58), (391, 58))
    picture.text(435, 32, "token ids", anchor="middle")
    picture.arrow((290, 76), (290, 149))
    picture.text(300, 118, "finished trajectories")
    picture.arrow((390, 178), (479, 178))
    picture.arrow((650, 178), (699, 178))
    picture.arrow((785, 150), (785, 48), (681, 48))
    picture.text(795, 105, "weights")
    return picture.svg()


def rollouts() -> str:
    """Draw the parts that sample: ledger, runner, pool of engines, and publisher of weights."""
    picture = Picture(880, 300, "Sampling: ledger, runner, engines, publisher")
    picture.box(10, 40, 80, 56, "prompts", GRAY, bold=True)
    picture.box(150, 20, 180, 96, "GroupLedger\ndrawn, leased,\ncomplete, delivered,\nacknowledged", AMBER, bold=True)
    picture.box(410, 20, 180, 96, "GroupRunner\nconversations, tools,\nrewards", BLUE, bold=True)
    picture.box(670, 20, 200, 176, "", GRAY)
    picture.text(770, 44, "EnginePool", INK, "middle", bold=True)
    picture.text(770, 62, "router, supervisor", INK, "middle")
    for i, state in enumerate(("ready", "ready", "starting")):
        picture.box(690, 74 + 40 * i, 160, 32, f"member {i}: {state}", AMBER if state == "starting" else GREEN)
    picture.box(150, 230, 180, 56, "training loop\nloss, optimizer", ROSE, bold=True)
    picture.box(410, 230, 180, 56, "WeightPublisher\nsnapshot of a version", GREEN, bold=True)
    picture.arrow((90, 68), (149, 68))
    picture.arrow((330, 50), (409, 50))
    picture.arrow((410, 86), (331, 86))
    picture.text(370, 43, "leases", anchor="middle")
    picture.text(370, 104, "rows", anchor="middle")
    picture.arrow((590, 50), (669, 50))
    picture.arrow((670, 86), (591, 86))
    picture.text(630, 43, "requests", anchor="middle")
    picture.text(630, 104, "samples", anchor="middle")
    picture.arrow((200, 116), (200, 229))
    picture.arrow((280, 230), (280, 117))
    picture.text(190, 178, "batches", anchor="end")
    picture.text(290, 178, "acknowledge")
    picture.arrow((330, 258), (409, 258))
    picture.text(370, 251, "weights", anchor="middle")
    picture.arrow((590, 258), (770, 258), (770, 197))
    picture.text(604, 251, "publish, commit, fill")
    return picture.svg()


def key_text(name: str) -> str:
    """Return a key of ``data/keys.py`` as it is written in code."""
    value = keys()[name]
    return ".".join(value) if isinstance(value, tuple) else value


def keys() -> dict[str, str | tuple[str, ...]]:
    """Read the constants of ``data/keys.py`` without importing torch."""
    tree = ast.parse((ROOT / "torchrl_rloo/data/keys.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant | ast.Tuple)
    }


def imports() -> dict[str, set[str]]:
    """Return which folders of the package each folder imports from."""
    package = ROOT / "torchrl_rloo"
    found: dict[str, set[str]] = {}
    for folder in sorted(p.name for p in package.iterdir() if (p / "__init__.py").exists()):
        modules = set()
        for path in (package / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == "torchrl_rloo":
                    modules |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom | ast.Import):
                    names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                    modules |= {n.split(".")[1] for n in names if n and n.startswith("torchrl_rloo.")}
        found[folder] = {m for m in modules if (package / m / "__init__.py").exists()} - {folder}
    return found


def module_map() -> str:
    """Draw the folders of the package in layers, each above what it imports; implied arrows are left out."""
    graph = imports()
    reach: dict[str, set[str]] = {}

    def below(folder: str) -> set[str]:
        if folder not in reach:
            reach[folder] = graph[folder].union(*(below(m) for m in graph[folder]))
        return reach[folder]

    depth: dict[str, int] = {}

    def layer(folder: str) -> int:
        if folder not in depth:
            depth[folder] = max((layer(m) + 1 for m in graph[folder]), default=0)
        return depth[folder]

    for folder in graph:
        below(folder)
    highest = max(map(layer, graph))
    picture = Picture(880, 80 * (highest + 1) + 10, "Folders of the package and their imports")
    place = {folder: (COLUMNS[folder], 10 + 80 * (highest - layer(folder))) for folder in graph}
    for folder, targets in graph.items():
        for target in sorted(t for t in targets if not any(t in reach[m] for m in targets)):
            (x0, y0), (x1, y1) = place[folder], place[target]
            picture.arrow((x0, y0 + 36), (x1, y1 - 1))
    for folder, (x, y) in place.items():
        picture.box(x - 70, y, 140, 36, folder, BLUE, bold=True)
    return picture.svg()


DRAWINGS = {"row": row_life, "loop": loop, "rollouts": rollouts, "module-map": module_map}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (PICTURES / f"{name}.svg").write_text(draw())
