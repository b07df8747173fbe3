"""Settings of Sphinx for the pages in this folder: ``sphinx-build -nW docs build/docs``."""

from __future__ import annotations

import reloadpg

project = "reloadpg"
copyright = "the reloadpg maintainers"  # noqa: A001 - Sphinx's name for it
release = version = reloadpg.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"reloadpg {release}"
html_static_path = ["_static"]
html_css_files = ["figures.css"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Instances are made by the library: their constructors are no part of the reference.
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}
napoleon_use_ivar = True
# Names of other projects, whose pages are not read. All names of this one must be found (``-n``).
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|concurrent|contextlib|datetime|logging|mmap|os|pathlib|torch)\..*"),
    (r"py:class", r"timedelta|ProcessGroup|DeviceMesh|(tuple|collections\.abc\.Mapping)\[.*"),
    # Types of fields that the library alone sets:
    (r"py:class", r"(.*\.)?(Construction|OwnGroups|UnderWay)"),
]
suppress_warnings = ["ref.python"]  # one name is found in two places: a module, and the top
