"""`after_import`: repairs run after a module's body, once, whoever imports it."""

import importlib
import inspect
import sys

import pytest

from k3_plugins.platform.cpu import import_hook
from k3_plugins.platform.cpu.import_hook import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("VALUE = 1\n\n\ndef function():\n    return VALUE\n")
    (folder / "user.py").write_text("from hooked_package.part import function\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [m for m in sys.modules if m.startswith("hooked_package")]:
        del sys.modules[name]
    for name in [m for m in import_hook._finder.repairs if m.startswith("hooked_package")]:
        del import_hook._finder.repairs[name]


def test_runs_after_the_body_in_order(package):
    seen = []
    after_import("hooked_package.part", lambda module: seen.append(("first", module.VALUE)))
    after_import("hooked_package.part", lambda module: seen.append(("second", module.function())))
    importlib.import_module("hooked_package")
    assert seen == []
    part = importlib.import_module("hooked_package.part")
    assert seen == [("first", 1), ("second", 1)]
    # Already imported: at once.
    after_import("hooked_package.part", lambda module: seen.append(module))
    assert seen[-1] is part


def test_a_replacement_is_what_others_import(package):
    def repair(module):
        module.function = lambda: 2

    after_import("hooked_package.part", repair)
    assert importlib.import_module("hooked_package.user").function() == 2


def test_the_module_keeps_its_source(package):
    after_import("hooked_package.part", lambda module: None)
    part = importlib.import_module("hooked_package.part")
    assert "return VALUE" in inspect.getsource(part.function)
    assert type(part.__spec__.loader) is importlib.machinery.SourceFileLoader


def test_a_failing_repair_fails_the_import(package):
    def repair(module):
        raise RuntimeError("the target moved")

    after_import("hooked_package.part", repair)
    with pytest.raises(RuntimeError, match="the target moved"):
        importlib.import_module("hooked_package.part")
    assert "hooked_package.part" not in sys.modules


def test_a_missing_module_stays_missing(package):
    after_import("hooked_package.absent", lambda module: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hooked_package.absent")
