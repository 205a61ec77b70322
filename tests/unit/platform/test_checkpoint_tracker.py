"""The tracker file keeps its old number until the new one is complete."""

from types import SimpleNamespace

import pytest

from k3_plugins.platform.cpu import checkpoint_tracker

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def files():
    # Megatron's object looks its members up when asked, as here; os is one of them.
    class Local:
        open = staticmethod(open)
        os = object()

    module = SimpleNamespace(maybe_msc=Local())
    original = module.maybe_msc
    checkpoint_tracker.repair(module)
    assert module.maybe_msc.os is original.os
    return module.maybe_msc


def test_the_old_number_stays_until_the_new_one_is_complete(files, tmp_path):
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    with files.open(str(tracker), "w") as f:
        f.write("4")
        f.flush()
        assert tracker.read_text() == "2"
    assert tracker.read_text() == "4"
    with files.open(str(tracker), "r") as f:
        assert f.read() == "4"
    assert [p.name for p in tmp_path.iterdir()] == [TRACKER]


def test_a_failed_write_leaves_the_old_number_and_no_litter(files, tmp_path):
    tracker = tmp_path / TRACKER
    tracker.write_text("2")
    with pytest.raises(OSError, match="No space left"), files.open(str(tracker), "w") as f:
        f.write("4")
        raise OSError("No space left on device")
    assert tracker.read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == [TRACKER]


def test_other_files_and_storage_are_left_alone(files, tmp_path):
    other = tmp_path / "progress.txt"
    with files.open(str(other), "w") as f:
        f.write("x")
        f.flush()
        assert other.read_text() == "x"

    def remote_open(path, mode):
        return "remote"

    module = SimpleNamespace(maybe_msc=SimpleNamespace(open=remote_open))
    checkpoint_tracker.repair(module)
    assert module.maybe_msc.open(f"msc://bucket/{TRACKER}", "w") == "remote"
