"""A file appears whole or not at all, and nothing is left beside it."""

import pytest

from k3_plugins.atomic import replacing


def test_a_file_is_replaced_whole_or_left_alone(tmp_path):
    path = tmp_path / "report.json"
    with replacing(path) as temporary:
        temporary.write_text("first")
        assert not path.exists() and temporary.parent == path.parent
    assert path.read_text() == "first"
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]
