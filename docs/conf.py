"""Sphinx: ``make docs`` builds with every warning an error and no broken reference."""

import re

from docutils import nodes

import jfleet

project = "jfleet"
author = "the jfleet authors"
release = jfleet.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
]
html_theme = "furo"
html_title = f"jfleet {release}"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
# Results are described in words, and ``words: more`` is no type.
napoleon_custom_sections = ["Returns"]

nitpicky = True
# The build needs no network, so names of other projects are not looked up; and what
# is private here has no page.
nitpick_ignore_regex = [
    (r"py:.*", r"(jax|jaxlib|optax|numpy|np|flax|etils|collections|os)\..*"),
    (r"py:.*", r"jfleet(\.\w+)*\._\w+.*"),
]


def setup(app):
    """Connect what follows to Sphinx."""
    app.connect("autodoc-process-docstring", untyped, priority=400)
    app.connect("missing-reference", options_table)


def untyped(app, what, name, obj, options, lines):
    """Keep napoleon from taking ``words: more`` in a property for a type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # an empty comment in front


def options_table(app, env, node, content):
    """Options have no page of their own, but a table on the page of settings."""
    words = re.findall("[A-Z][a-z0-9]*", node["reftarget"])
    if node["reftarget"].endswith("Configs"):
        page = app.builder.get_relative_uri(env.docname, "settings")
        uri = f"{page}#{'-'.join(words).lower()}"
        return nodes.reference("", "", content, internal=True, refuri=uri)
    return None
