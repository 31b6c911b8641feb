"""Sphinx configuration of the documentation; ``make docs`` builds it."""

from __future__ import annotations

import re
import sys
from html import unescape
from importlib import import_module
from pathlib import Path

from docutils.nodes import SkipNode
from latex2mathml.converter import convert
from sphinx.util.nodes import make_refnode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import generate  # noqa: E402

project = "torchrl_rloo"
author = "the torchrl_rloo authors"
version = release = re.search(r'__version__ = "(.+)"', (ROOT / "torchrl_rloo/__init__.py").read_text())[1]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
source_suffix = {".md": "myst-nb", ".py": "myst-nb"}
exclude_patterns = ["_build", "*.py"]
suppress_warnings = ["mystnb.unknown_mime_type"]

# Markdown and tutorials: percent scripts, executed once for each change of their text
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
nb_custom_formats = {".py": "generate.read_notebook"}
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

# API pages: the public names of each package, in the order of the source
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
add_module_names = False
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
nitpicky = True  # a reference to a name of this package must resolve; other packages are not indexed
nitpick_ignore_regex = [(r"py:.*", r"(?!torchrl_rloo\.).*")]

html_theme = "furo"
html_title = f"torchrl_rloo {release}"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    app.connect("builder-inited", lambda app: generate.write_pages(Path(app.srcdir)))
    app.connect("missing-reference", resolve_reference)
    app.connect("autodoc-skip-member", skip_tensordict)
    app.connect(
        "autodoc-process-bases",
        lambda app, name, cls, options, bases: bases.remove(object) if object in bases else None,
    )
    app.add_html_math_renderer("mathml", (visit_inline_math, None), (visit_block_math, None))


def skip_tensordict(app, what, name, member, skip, options):
    """Leave out methods that tensordict copies into its tensorclasses."""
    module = getattr(getattr(member, "__func__", member), "__module__", None) or ""
    return True if module.startswith("tensordict") else None


html_math_renderer = "mathml"


def visit_inline_math(self, node):
    """Write an inline equation as MathML, which browsers draw without scripts."""
    self.body.append(convert(unescape(node.astext())))
    raise SkipNode


def visit_block_math(self, node):
    """Write a displayed equation as MathML."""
    self.body.append(f'<div class="math">{convert(unescape(node.astext()), display="block")}</div>')
    raise SkipNode


def resolve_reference(app, env, node, contnode):
    """Resolve a name by the package that publishes it; show a name that only the code has as plain text."""
    target = node.get("reftarget", "")
    if not target.startswith("torchrl_rloo."):
        return None
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        for name in (".".join([*parts[:cut], *parts[end:]]) for end in (len(parts) - 1, len(parts) - 2)):
            found = env.get_domain("py").objects.get(name)
            if found and name != target:
                return make_refnode(app.builder, node.get("refdoc", ""), found.docname, found.node_id, contnode, name)
    return contnode if exists(parts) else None


def exists(parts: list[str]) -> bool:
    """Return whether a dotted name is that of a module or of something in one; a function may hide its module."""
    for cut in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name, None)
        return found is not None
    return False
