"""docs/adding_a_feature.md, followed to the letter: its blocks are written out, recorded, and trained with."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.toys import TINY_GPT, run_ranks

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: embedding-scale\nVersion: 1.0\n",
    "entry_points.txt": "[k3_plugins.features]\nembedding-scale = embedding_scale:FEATURE\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of the page, and the metadata that `pip install -e .` would leave for its pyproject.toml."""
    folder = tmp_path_factory.mktemp("embedding-scale")
    blocks = dict(BLOCK.findall((ROOT / "docs" / "adding_a_feature.md").read_text()))
    assert set(blocks) == {"embedding_scale.py", "pyproject.toml"}
    assert 'embedding-scale = "embedding_scale:FEATURE"' in blocks["pyproject.toml"]
    for name, text in blocks.items():
        (folder / name).write_text(text)
    metadata = folder / "embedding_scale-1.0.dist-info"
    metadata.mkdir()
    for name, text in DISTRIBUTION.items():
        (metadata / name).write_text(text)
    return folder


def test_the_page_gives_a_feature_that_trains_and_refuses(folder, tmp_path):
    record = ["-m", "k3_plugins.patching.record", "--feature", "embedding-scale", "--out", "embedding_scale.json"]
    path = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(
        [sys.executable, *record], cwd=folder, env=path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and "1 targets" in done.stdout, done

    words = [*TINY_GPT, "--train-iters", "1", "--lr-warmup-iters", "0", "--k3-platform", "cpu"]
    words += ["--k3-plugins", "embedding-scale", "--embedding-scale"]
    ranks = run_ranks("k3_plugins.pretrain_gpt", [*words, "4"], tmp_path, TOY_FOLDER=str(folder))
    assert ranks.codes == [0], ranks
    (log,) = ranks.logs
    assert "wrap LanguageModelEmbedding.forward" in log and "lm loss" in log, ranks
    assert re.search(r"witness embedding-scale: \d+ scaled embeddings", log), ranks

    ranks = run_ranks("k3_plugins.pretrain_gpt", [*words, "0"], tmp_path, TOY_FOLDER=str(folder))
    (log,) = ranks.logs
    assert ranks.codes == [2] and "--embedding-scale 0 must be positive" in log and "lm loss" not in log, ranks
