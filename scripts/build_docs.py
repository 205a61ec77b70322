"""Builds the documentation site with MkDocs: ``bash scripts/build_docs.sh [--serve] [OUTPUT]``.

The pages are the Markdown files of the repository, as they are. They are copied, with every file that they link to,
under the same relative paths, so that their links work here as they do in a checkout; the navigation and the page of
all features are generated. MkDocs runs strictly: a link or an anchor that leads nowhere ends the build, and so does a
feature without a page, or a page without a place in the navigation.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import io
import logging
import os
import posixpath
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.commands.build import build as build_with_mkdocs
from mkdocs.config.base import load_config
from mkdocs.exceptions import MkDocsException

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout's features, also where another one is installed

from k3_plugins import features  # noqa: E402

HOME = "README.md"
FEATURES_PAGE = "features.md"
GUIDES = {
    "Migration": "docs/migration.md",
    "Adding a feature": "docs/adding_a_feature.md",
    "Troubleshooting": "docs/troubleshooting.md",
    "Examples": "examples/kimi_k3/README.md",
}
REFERENCE = {
    "Verification": "docs/verification.md",
    "Benchmarks": "docs/benchmarks.md",
    "Patches": "docs/patches.md",
    "Decisions": "docs/decisions.md",
}
PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", "k3_plugins/**/*.md", "benchmarks/**/*.md", "patches/**/*.md")

STYLE_FILE = "site.css"
STYLE = """\
/* The theme keeps every cell of a table on one line, and pages narrow; ours hold sentences in tables. */
.wy-table-responsive table td, .wy-table-responsive table th { white-space: normal; }
.wy-nav-content { max-width: 1100px; }
"""

_TARGET = re.compile(r"""\]\(\s*([^)\s]+)|(?:href|src)=["']([^"']+)""")


class SiteError(Exception):
    """What is wrong with the pages, in a sentence."""


# -- pages and navigation ----------------------------------------------------------------------------------------------


def pages(root: Path) -> list[str]:
    """Every Markdown file of the site, relative to the repository."""
    return sorted({path.relative_to(root).as_posix() for place in PLACES for path in root.glob(place)})


def navigation(root: Path, entries: Sequence[features.FeatureEntry] = features.BUILT_IN) -> list:
    """MkDocs' ``nav``.

    Raises:
        SiteError: a feature has no page, a page has no place, or one that has a place does not exist.
    """
    found = pages(root)
    of_features = {entry.name: f"{entry.folder}/README.md" for entry in entries}
    for name, page in of_features.items():
        if page not in found:
            raise SiteError(f"feature {name!r} has no page: write {page}")
    named = {HOME, *of_features.values(), *GUIDES.values(), *REFERENCE.values()}
    if absent := sorted(named - set(found)):
        raise SiteError(f"{absent[0]} is in the navigation and does not exist: change scripts/build_docs.py")
    components = [page for page in found if page not in named and re.fullmatch(r"k3_plugins/.+/README\.md", page)]
    if placeless := sorted(set(found) - named - set(components)):
        raise SiteError(
            f"{placeless[0]} has no place in the navigation: add it to GUIDES or REFERENCE in scripts/build_docs.py"
        )
    return [
        {"Home": HOME},
        {"Features": [{"All features": FEATURES_PAGE}, *({name: page} for name, page in of_features.items())]},
        {"Guides": [{title: page} for title, page in GUIDES.items()]},
        {"Reference": [{title: page} for title, page in REFERENCE.items()]},
        {"Components": [{_title(root / page): page} for page in components]},
    ]


def _title(page: Path) -> str:
    """The heading of a page without what it says in brackets."""
    heading = re.match(r"# ([^(\n]+)", page.read_text(encoding="utf-8"))
    if heading is None:
        raise SiteError(f"{page}: a page begins with its title, '# ...'")
    return heading[1].replace("`", "").strip()


def linked_files(root: Path, page: str) -> Iterator[str]:
    """Files of the repository, other than pages, to which a page links. Wrong links are MkDocs' to report."""
    for match in _TARGET.finditer((root / page).read_text(encoding="utf-8")):
        target = (match[1] or match[2]).partition("#")[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if target and not path.startswith(("..", "/")) and path != "." and (root / path).is_file():
            yield path


# -- the page of all features ------------------------------------------------------------------------------------------


def features_page(root: Path) -> str:
    """The generated page: every feature of the registry, what it is, what it needs, and its flags.

    Imports Megatron, whose own code reads flags and help texts from the config classes, as it does in training.
    """
    from k3_plugins import platform

    warnings.simplefilter("ignore")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # banners of the platform and of packages
        platform.select("cpu")
        from k3_plugins.argument_groups import FeatureArgumentGroupFactory

        loaded = [(entry, features.load(entry)) for entry in features.BUILT_IN]
    rows, sections = [], []
    for entry, feature in loaded:
        about = first_paragraph(root, f"{entry.folder}/README.md")
        page, needs, excludes = f"{entry.folder}/README.md", _names(feature.requires), _names(feature.conflicts)
        rows.append(f"| [`{entry.name}`]({page}) | {_cell(about)} | {needs} | {excludes} | [flags](#{entry.name}) |")
        sections += ["", f"## {entry.name}", "", f"[{entry.folder}]({page}): {entry.summary}.", ""]
        if feature.config is None:
            sections.append("No flags of its own.")
            continue
        group = FeatureArgumentGroupFactory(feature.config).build_group(
            argparse.ArgumentParser(add_help=False), title=entry.name
        )
        sections += ["| flag | default | |", "|---|---|---|", *map(_flag_row, group._group_actions)]
    return "\n".join(
        [
            "# Features",
            "",
            "What can stand behind `--k3-plugins`, from the registry (`k3_plugins/features.py`). Flags, defaults and"
            " texts are those of the command line.",
            "",
            "| feature | what it is | requires | excludes | |",
            "|---|---|---|---|---|",
            *rows,
            *sections,
            "",
        ]
    )


def first_paragraph(root: Path, page: str) -> str:
    """What stands under a page's title, with its links as they are from the repository's top folder.

    Raises:
        SiteError: there is no such paragraph.
    """
    match = re.match(r"# [^\n]+\n\n(\S.*?)(?:\n\n|\Z)", (root / page).read_text(encoding="utf-8"), re.DOTALL)
    if match is None or match[1].startswith(("#", "|", "```", "- ")):
        raise SiteError(f"{page}: under the title stands a paragraph that says what the feature is")
    folder = posixpath.dirname(page)

    def rebased(link: re.Match) -> str:
        target = link[1]
        if target.startswith("#"):
            return f"]({page}{target})"
        return link[0] if ":" in target else f"]({posixpath.normpath(posixpath.join(folder, target))})"

    return re.sub(r"\]\(([^)\s]+)\)", rebased, " ".join(match[1].split()))


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"[`{name}`](#{name})" for name in names) or "–"


def _flag_row(action: argparse.Action) -> str:
    if action.nargs == 0:
        default = "on; the flag turns it off" if action.default else "off"
    else:
        default = "none" if action.default is None else f"`{action.default}`"
    text = action.help or ""
    if action.choices:
        text += f" One of {', '.join(f'`{choice}`' for choice in action.choices)}."
    return f"| {', '.join(f'`{flag}`' for flag in action.option_strings)} | {default} | {_cell(text, plain=True)} |"


def _cell(text: str, plain: bool = False) -> str:
    """Text for a cell of a table; a plain one is not Markdown but for its code spans."""
    if plain:
        text = "".join(
            part if number % 2 else re.sub(r"([*_<\[])", r"\\\1", part)
            for number, part in enumerate(re.split(r"(`[^`]*`)", text))
        )
    return text.replace("|", r"\|")


# -- MkDocs ------------------------------------------------------------------------------------------------------------


class GitHubDialect(Extension):
    """The two places in which our pages, which are written for GitHub, mean something else to Python-Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Registered behind fenced code (25), which is stashed away by then."""
        md.preprocessors.register(_GitHubLines(md), "github", 24)


class _GitHubLines(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        result: list[str] = []
        for line in lines:
            # Items are nested by two spaces; four would be needed. Code is indented by four.
            line = re.sub(r"^  (?=([-*+]|\d+\.) )", "    ", line)
            # In a code span of a table's cell, \| is a bar. Python-Markdown splits cells by bars outside of code only.
            if line.startswith("|"):
                line = re.sub(r"`[^`]*`", lambda span: span[0].replace(r"\|", "|"), line)
            result.append(line)
        return result


def slug(text: str, separator: str) -> str:
    """A heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def build(root: Path, output: Path, features_text: str) -> None:
    """Builds the site of a checkout.

    Args:
        features_text: of :func:`features_page`.

    Raises:
        SiteError: see :func:`navigation`; or MkDocs found fault, which its messages, printed before, describe.
    """
    nav = navigation(root)
    with tempfile.TemporaryDirectory() as folder:
        stage, site = Path(folder, "pages"), Path(folder, "site")
        names = pages(root)
        if FEATURES_PAGE in names:
            raise SiteError(f"{FEATURES_PAGE} is the name of the generated page: rename the file")
        for name in sorted({*names, *(file for page in names for file in linked_files(root, page))}):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, stage / name)
        (stage / FEATURES_PAGE).write_text(features_text, encoding="utf-8")
        (stage / STYLE_FILE).write_text(STYLE, encoding="utf-8")
        with _messages():
            try:
                build_with_mkdocs(_config(stage, site, nav))
            except MkDocsException as error:
                raise SiteError(str(error)) from error
        _publish(site, output)


@contextmanager
def _messages() -> Iterator[None]:
    """MkDocs' warnings on stderr, whatever became of logging."""
    logger, handler = logging.getLogger("mkdocs"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("[docs] %(message)s"))
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before


def _config(stage: Path, site: Path, nav: list) -> object:
    config = load_config(
        io.BytesIO(b"{}"),
        config_file_path=str(stage.parent / "mkdocs.yml"),
        site_name="k3_plugins",
        docs_dir=str(stage),
        site_dir=str(site),
        nav=nav,
        # highlight.js would come from the network
        theme={"name": "readthedocs", "highlightjs": False, "navigation_depth": 2},
        extra_css=[STYLE_FILE],
        plugins=["search"],
        markdown_extensions=["tables", "fenced_code", {"toc": {"slugify": slug}}],
        use_directory_urls=False,  # pages can be opened without a server
        strict=True,
        validation={
            "nav": {"omitted_files": "warn", "not_found": "warn", "absolute_links": "warn"},
            "links": {
                "not_found": "warn",
                "anchors": "warn",
                "absolute_links": "warn",
                "unrecognized_links": "warn",
            },
        },
    )
    config.markdown_extensions.append(GitHubDialect())  # its check wants names; Python-Markdown takes objects too
    return config


def check_output(output: Path) -> None:
    """Refuses a folder that holds anything but an earlier site.

    Raises:
        SiteError: with the folder.
    """
    mark = output / Path(FEATURES_PAGE).with_suffix(".html")
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not mark.is_file())):
        raise SiteError(f"{output} exists and is no site of this program: name a new folder")


def _publish(site: Path, output: Path) -> None:
    check_output(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as aside:
        fresh = Path(shutil.copytree(site, Path(aside, "new")))
        if output.exists():
            os.replace(output, Path(aside, "old"))
        os.replace(fresh, output)


def serve(output: Path) -> None:
    """Shows the site until interrupted."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(output))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
        print("[docs] http://127.0.0.1:8000 (end with Ctrl-C)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def main(argv: list[str] | None = None) -> int:
    """0; 1 if the pages are at fault."""
    parser = argparse.ArgumentParser(prog="bash scripts/build_docs.sh", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "build" / "site", metavar="OUTPUT")
    parser.add_argument("--serve", action="store_true", help="show the site on http://127.0.0.1:8000")
    options = parser.parse_args(argv)
    try:
        navigation(ROOT)  # before Megatron is imported for the flags
        check_output(options.output)
        build(ROOT, options.output.absolute(), features_page(ROOT))
    except SiteError as error:
        print(f"[docs] FAILED: {error}", file=sys.stderr)
        return 1
    print(f"[docs] {options.output / 'index.html'}")
    if options.serve:
        serve(options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
