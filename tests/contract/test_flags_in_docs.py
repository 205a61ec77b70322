"""Every flag that a page names exists: in Megatron's parser, in a feature, or in one of our programs."""

import argparse
import ast
import re
from pathlib import Path

from k3_plugins import arguments, features
from k3_plugins.plan.__main__ import SIZES
from tests.harness.spawn import spawn

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
ELSEWHERE = {
    "adding_a_feature.md": {"--embedding-scale", "--nproc-per-node"},  # of the feature that the page builds; torchrun's
}


def stock_flags(rank, world_size):
    """Of Megatron's own parser."""
    from megatron.training.arguments import add_megatron_arguments

    return set(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._option_string_actions)


def flags_of_features():
    configs = filter(None, (features.load(entry).config for entry in features.BUILT_IN))
    options = [words for config in configs for words in arguments.option_strings(config).values()]
    return {flag for words in options for flag in words}


def flags_of_programs():
    """What the sources give to argument parsers, and what our shell scripts distinguish."""
    found = {f"--{flag}" for flag in SIZES.values()}
    sources = [file for folder in ("k3_plugins", "benchmarks", "tests") for file in (ROOT / folder).rglob("*.py")]
    for file in sources:
        text = file.read_text()
        if "add" not in text or "argparse" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and {"add_argument", "add"} & {_name(node.func)}:
                found |= {a.value for a in node.args if isinstance(a, ast.Constant) and FLAG.fullmatch(str(a.value))}
    scripts = [file for folder in ("patches", "scripts") for file in (ROOT / folder).rglob("*.sh")]
    return found | {flag for file in scripts for flag in FLAG.findall(file.read_text())}


def _name(function):
    return getattr(function, "attr", getattr(function, "id", ""))


def columns(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def ours(page):
    """A page's text without what it quotes of other projects: the first column of the tables of migration.md."""
    text = page.read_text()
    if page.name != "migration.md":
        return text
    return "\n".join(" ".join(columns(line)[1:]) if line.startswith("|") else line for line in text.splitlines())


def test_every_flag_exists():
    (stock,) = spawn(stock_flags, 1)
    known = stock | flags_of_features() | flags_of_programs()
    pages = [ROOT / "README.md"]
    pages += [page for folder in ("docs", "examples", "k3_plugins") for page in sorted((ROOT / folder).rglob("*.md"))]
    assert len(pages) > 25
    for page in pages:
        named = set(FLAG.findall(ours(page))) - ELSEWHERE.get(page.name, set())
        assert named <= known, f"{page.relative_to(ROOT)}: {sorted(named - known)}"
    migration = (ROOT / "docs" / "migration.md").read_text()
    assert len(set(FLAG.findall(ours(ROOT / "docs" / "migration.md")))) > 50
    # What the page says upstream Megatron has, it has.
    upstream = migration.split("## From flags of upstream Megatron-LM")[1].split("\n## ")[0]
    theirs = {flag for line in upstream.splitlines() if line.startswith("|") for flag in FLAG.findall(columns(line)[0])}
    assert len(theirs) > 25 and theirs <= stock, sorted(theirs - stock)
