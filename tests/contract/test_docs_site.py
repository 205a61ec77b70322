"""The documentation site: it builds, has a page for every feature, and every link of its pages leads somewhere."""

import importlib.util
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from k3_plugins import arguments, features
from tests.harness.spawn import spawn

ROOT = Path(__file__).parents[2]


def program():
    """scripts/build_docs.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_whole(rank, world_size, output):
    """The program as it is started, in a process that has Megatron."""
    return program().main([output])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    output = tmp_path_factory.mktemp("docs") / "site"
    assert spawn(build_whole, 1, str(output)) == [0]
    return output


class Page(HTMLParser):
    """Links, anchors and text of a built page."""

    def __init__(self, file):
        super().__init__()
        self.links, self.anchors, self.words = [], set(), []
        self.feed(file.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values[name] for name in ("href", "src") if values.get(name)]
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}

    def handle_data(self, data):
        self.words.append(data)


def wrong_links(site):
    """(page, link) of every link to this site that leads nowhere; other addresses are not looked up."""
    pages = {file: Page(file) for file in site.rglob("*.html")}
    for file, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            target = file
            if path:  # the page of errors is served for any address, and its links begin at the top
                target = site / path.lstrip("/") if path.startswith("/") else (file.parent / path).resolve()
            if target.is_dir():
                target /= "index.html"
            there = target.is_relative_to(site) and target.is_file()
            if there and parts.fragment:
                there = target in pages and unquote(parts.fragment) in pages[target].anchors
            if not there:
                yield str(file.relative_to(site)), link


def test_every_feature_has_its_page_and_its_flags(site):
    listed = Page(site / "features.html")
    for entry in features.BUILT_IN:
        page = f"{entry.folder}/index.html"
        assert (site / page).is_file(), entry.name
        assert page in listed.links and entry.name in listed.anchors, entry.name
        config = features.load(entry).config
        for options in arguments.option_strings(config).values() if config else ():
            assert options[0] in listed.words, options


def test_every_link_of_the_built_site_leads_somewhere(site):
    assert len(list(site.rglob("*.html"))) > len(features.BUILT_IN) + 10
    assert list(wrong_links(site)) == []


def test_pages_load_nothing_from_elsewhere(site):
    for file in site.rglob("*.html"):
        text = file.read_text()
        for attribute in ('src="http', "src='http", '<link rel="stylesheet" href="http', 'src="//'):
            assert attribute not in text, file
    for file in site.rglob("*.css"):
        assert "url(http" not in file.read_text() and "@import" not in file.read_text(), file


def test_the_check_of_links_finds_wrong_ones(site, tmp_path):
    copy = tmp_path / "site"
    shutil.copytree(site, copy)
    (copy / "index.html").write_text('<a href="docs/gone.html"></a><a href="#gone"></a><img src="../outside.svg">')
    assert {link for page, link in wrong_links(copy) if page == "index.html"} == {
        "docs/gone.html", "#gone", "../outside.svg"
    }  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    """The pages of this checkout and what they link to, to be spoilt."""
    build_docs, root = program(), tmp_path / "checkout"
    names = build_docs.pages(ROOT)
    for name in {*names, *(file for page in names for file in build_docs.linked_files(ROOT, page))}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, root / name)
    return root


def build_copy(root):
    build_docs = program()
    try:
        build_docs.build(root, root / "build" / "site", "# Features\n")
    except build_docs.SiteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "page, line",
    [
        ("docs/decisions.md", "[gone](gone.md)"),
        ("docs/decisions.md", "[gone](../k3_plugins/gone.yaml)"),
        ("docs/decisions.md", "[gone](verification.md#gone)"),
        ("README.md", "[gone](docs/benchmarks.md#gone)"),
        ("README.md", "[gone](#gone)"),
        ("k3_plugins/transformer/kda/README.md", "[above](/README.md)"),
    ],
)
def test_a_wrong_link_fails_the_build(copy, capfd, page, line):
    with (copy / page).open("a") as stream:
        stream.write(f"\n{line}\n")
    assert "strict" in build_copy(copy)
    message = capfd.readouterr().err
    assert page in message and line.partition("(")[2].rstrip(")") in message, message
    assert not (copy / "build" / "site").exists()


def test_an_unspoilt_copy_is_built(copy):
    assert build_copy(copy) == ""
    assert (copy / "build" / "site" / "index.html").is_file()


def test_a_page_without_a_place_and_a_feature_without_a_page_fail_the_build(copy):
    new = copy / "docs" / "new.md"
    new.write_text("# New\n")
    assert "docs/new.md has no place in the navigation" in build_copy(copy)
    new.unlink()
    page = copy / features.BUILT_IN[0].folder / "README.md"
    page.unlink()
    assert f"feature {features.BUILT_IN[0].name!r} has no page: write" in build_copy(copy)


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    build_docs = program()
    (tmp_path / "thesis.txt").write_text("only copy")
    with pytest.raises(build_docs.SiteError, match="name a new folder"):
        build_docs.check_output(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "only copy"
