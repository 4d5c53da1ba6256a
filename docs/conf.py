"""How `make docs` builds these pages into a site."""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from safe_trainers.core.versions import __version__


project = "safe-trainers"
author = "the safe-trainers authors"
project_copyright = "the safe-trainers authors, Apache-2.0"
release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = True
default_role = "code"  # docstrings write code in single backticks

myst_heading_anchors = 4  # links such as lora.md#which-dtype-adapters-get
myst_enable_extensions = ["attrs_inline"]
myst_html_meta = {
    "description": "Drop-in replacements for TRL's trainers that get mixed precision "
    "right: bf16, fp16, LoRA, QLoRA, vision-language models."
}
smartquotes = False  # options such as --dry-run are copied as they are written

autodoc_typehints = "signature"
autodoc_default_options = {"show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Types of other projects, whose documentation is not linked: a build needs no network.
nitpick_ignore_regex = [("py:.*", r".*")]

html_theme = "furo"
html_title = f"safe-trainers {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = True
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


LOOKED_UP = {
    "metrics", "errors_torch", "errors_transformers", "errors_python", "errors_libraries",
    "refusals", "config",
}  # fmt: skip
"""Pages whose entries a search finds by any part of their heading."""


class SearchableHeadings(SphinxTransform):
    """Adds index entries for the parts of a heading, its label, and code after "Also".

    The search of Sphinx finds a heading, or an index entry, only by half of its characters.
    """

    default_priority = 700  # before the index is collected

    def apply(self, **kwargs: Any) -> None:
        """Adds the entries of the page."""
        if self.env.docname not in LOOKED_UP:
            return
        for section in list(self.document.findall(nodes.section)):
            place, title = section["ids"][0], section[0].astext()
            texts = [title, *section["ids"], *section["names"], *re.split("…|: |/", title)]
            for paragraph in section.children:
                if isinstance(paragraph, nodes.paragraph) and paragraph.astext().startswith(
                    ("Also", "Logged as")
                ):
                    also = [code.astext() for code in paragraph.findall(nodes.literal)]
                    texts += [
                        part for code in also for part in (code, *re.split("…|/", code))
                    ]
            plain = dict.fromkeys(text.replace(";", ",").strip(" !`") for text in texts)
            entries = [
                ("single", text, place, "main", None) for text in plain if len(text) > 3
            ]
            section.insert(1, addnodes.index(entries=entries))


def setup(app: Sphinx) -> None:
    """Registers the transform."""
    app.add_transform(SearchableHeadings)
