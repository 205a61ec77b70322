"""docs/adding_a_feature.md, followed to the letter: its blocks are written out, recorded, installed, trained with."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.toys import TINY_GPT, run_ranks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python(folder, path, *words):
    """Runs Python there; returns its output, which a failure shows."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, path)))}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(source, target):
    """As `pip install .` would, into a folder of its own. Not editable: what the wheel does not hold is not there."""
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    python(source, source, "-m", "pip", "install", *options, "--target", str(target), ".")
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The files of the page."""
    source = tmp_path_factory.mktemp("source")
    blocks = dict(BLOCK.findall((ROOT / "docs" / "adding_a_feature.md").read_text()))
    assert set(blocks) == {"embedding_scale/feature.py", "pyproject.toml", "test_embedding_scale.py"}
    (source / "embedding_scale").mkdir()
    (source / "embedding_scale" / "__init__.py").write_text("")
    for name, text in blocks.items():
        (source / name).write_text(text)
    return source


@pytest.fixture(scope="module")
def site(source, tmp_path_factory):
    """Recorded, then installed with the record."""
    before = install(source, tmp_path_factory.mktemp("before"))
    record = ("-m", "k3_plugins.patching.record", "--feature", "embedding-scale")
    said = python(source, before, *record, "--out", "embedding_scale/fingerprints.json")
    assert "1 targets" in said
    return install(source, tmp_path_factory.mktemp("site"))


def test_the_page_gives_a_feature_that_trains_and_refuses(site, tmp_path):
    words = [*TINY_GPT, "--train-iters", "1", "--lr-warmup-iters", "0", "--k3-platform", "cpu"]
    words += ["--k3-plugins", "embedding-scale", "--embedding-scale"]
    two = [*words, "4", "--pipeline-model-parallel-size", "2"]
    ranks = run_ranks("k3_plugins.pretrain_gpt", two, tmp_path, 2, TOY_FOLDER=str(site))
    assert ranks.codes == [0, 0], ranks
    log = ranks.logs[0]
    assert "wrap LanguageModelEmbedding.forward" in log and "lm loss" in "".join(ranks.logs), ranks
    assert re.search(r"witness embedding-scale: \d+ embeddings, \S+ -> \S+ \(rank 0\)", log), ranks
    assert "witness embedding-scale: no embedding on this pipeline stage (rank 1)" in log, ranks

    ranks = run_ranks("k3_plugins.pretrain_gpt", [*words, "0"], tmp_path, TOY_FOLDER=str(site))
    (log,) = ranks.logs
    assert ranks.codes == [2] and "--embedding-scale 0 must be positive" in log and "lm loss" not in log, ranks


@pytest.mark.slow
def test_the_test_of_the_page_passes(source, site):
    assert "1 passed" in python(source, site, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_embedding_scale.py")
