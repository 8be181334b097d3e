"""How Sphinx builds the site: `make docs`. Its source is the repository, so a link leads to the same file there and here."""

from __future__ import annotations

import os
import shutil
from functools import cache
from logging import LogRecord, getLogger
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.osutil import relative_uri

import agent_tunix

REPOSITORY = Path(__file__).parents[1]
FILES = "files"  # where the site has what pages link to and what is no page itself, such as examples
log = logging.getLogger(__name__)

project = "Agent-Tunix"
version = release = agent_tunix.__version__
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/*.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["docs/_build", ".*", "runs", "multirun", "evaluations", "tune"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
default_role = "code"
highlight_language = "none"
nitpick_ignore_regex = [("py:.*", r"(?!agent_tunix\.\w+$).*")]  # names of other projects and of our own inner modules

myst_all_links_external = True  # `follow` resolves the links of both kinds of pages
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = "Agent-Tunix"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]


def follow(app: Sphinx, page: nodes.document, name: str) -> None:
    """Leads links between files to pages of the site, or to copies of files, and warns of those that lead nowhere."""
    here = Path(app.env.doc2path(name)).resolve()
    for link in page.findall(nodes.reference):
        uri = link.get("refuri", "")
        path, _, anchor = uri.partition("#")
        if link.get("internal") or "://" in uri or uri.startswith("mailto:"):
            continue
        target = (here.parent / path).resolve() if path else here
        if not target.exists() or not target.is_relative_to(REPOSITORY):
            log.warning("a link leads nowhere: %s", uri, location=link)
        elif (other := app.env.path2doc(target)) in app.env.found_docs:
            if anchor and anchor not in anchors(app, other):
                log.warning("no heading of %s is called #%s", other, anchor, location=link)
            link["refuri"] = (app.builder.get_relative_uri(name, other) if path else "") + uri[len(path) :]
            link["internal"] = True
        else:
            link["refuri"] = relative_uri(app.builder.get_target_uri(name), copied(app, target.relative_to(REPOSITORY)))


@cache
def anchors(app: Sphinx, name: str) -> set[str]:
    return {anchor for node in app.env.get_doctree(name).findall(nodes.Element) for anchor in node["ids"]}


def copied(app: Sphinx, path: Path) -> str:
    """Copies a file, as text that every browser shows, or a folder's list of files; gives its place in the site."""
    target = Path(FILES, path if path.suffix == ".ipynb" else f"{path}.txt")
    (app.outdir / target).parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        listed = sorted(str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / path).rglob("*") if file.is_file())
        (app.outdir / target).write_text("\n".join(listed) + "\n")
    else:
        shutil.copyfile(REPOSITORY / path, app.outdir / target)
    return target.as_posix()


def begin_at_the_index(app: Sphinx, fault: Exception | None) -> None:
    """Leads whoever opens the folder to its first page."""
    if fault is None and app.builder.format == "html":
        (app.outdir / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n')


def no_page_yet(warning: LogRecord) -> bool:
    """Whether a pattern in a table of contents finds nothing, which is no fault here."""
    return "glob pattern" in str(warning.msg)


def setup(app: Sphinx) -> None:
    getLogger("sphinx.sphinx.directives.other").addFilter(lambda warning: not no_page_yet(warning))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    app.connect("doctree-resolved", follow)
    app.connect("build-finished", begin_at_the_index)
