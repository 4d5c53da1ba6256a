"""How `make docs` builds these pages into a site."""

from safe_trainers.core.versions import __version__


project = "safe-trainers"
author = "the safe-trainers authors"
project_copyright = "the safe-trainers authors, Apache-2.0"
release = __version__
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "safe-trainers"
myst_heading_anchors = 4  # links such as guide.md#adapters
exclude_patterns = ["_build"]
nitpicky = True
