"""Settings of the site: ``uv run sphinx-build -W -c docs . site`` in the root of the repository."""

project = "fedbench"
copyright = "the fedbench authors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "fedbench.site"]
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "results/**"]
exclude_patterns = ["**/page.md", "docs/runs", "docs/sweeps", "docs/figures", "docs/_*"]
templates_path = ["_templates"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "auto"  # the notebook is stored without outputs
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
default_role = "code"  # `name` in docstrings
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "fedbench"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]  # an overview for language models
html_css_files = ["site.css"]
html_js_files = ["sort.js"]
html_additional_pages = {"index": "index.html"}
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
