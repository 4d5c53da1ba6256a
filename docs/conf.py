"""How `make docs` builds these pages into a site."""

from safe_trainers.core.versions import __version__


project = "safe-trainers"
author = "the safe-trainers authors"
project_copyright = "the safe-trainers authors, Apache-2.0"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build"]
nitpicky = True
default_role = "code"  # docstrings write code in single backticks

myst_heading_anchors = 4  # links such as lora.md#which-dtype-adapters-get
myst_enable_extensions = ["attrs_inline"]
myst_html_meta = {
    "description": "Drop-in replacements for TRL's trainers that get mixed precision right: bf16, fp16, LoRA, QLoRA, "
    "vision-language models."
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
