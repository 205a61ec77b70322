"""Checkpoints that a draft cannot be trained from."""

from types import SimpleNamespace

import pytest

from k3_plugins import draft_gpt
from k3_plugins.feature import FeatureError


@pytest.mark.parametrize(("metadata", "error"), [(None, "FileNotFoundError"), (b"another format", "UnpicklingError")])
def test_a_checkpoint_of_another_format_is_named(tmp_path, metadata, error):
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    if metadata is not None:
        (folder / ".metadata").write_bytes(metadata)
    args = SimpleNamespace(load=str(tmp_path), ckpt_step=None, finetune=True)
    with pytest.raises(
        FeatureError, match=rf"--load .*iter_0000007 is no torch_dist checkpoint \({error}: .* give one"
    ):
        draft_gpt._holds_draft(args)
