"""Every way in which a patch can be wrong, on toy targets: what is refused, what is rebound, what is taken back."""

import sys
import types
from dataclasses import replace

import pytest

from k3_plugins.patching import (
    BodyDrift,
    DoubleReplace,
    MissingTarget,
    Overwritten,
    Patch,
    PatchError,
    PatchKind,
    PatchManager,
    PatchState,
    SignatureDrift,
    UnrecordedTarget,
)
from tests.contract.toys import forget, load, patch, record, toy_package

WRAP, REPLACE, REGISTER = PatchKind.WRAP, PatchKind.REPLACE, PatchKind.REGISTER

SOURCES = {
    "origin": """
        def step(x):
            return [x]

        def other(x):
            return [x]

        class Layer:
            def forward(self, x):
                return x

            @staticmethod
            def helper(x):
                return x

            @classmethod
            def make(cls, x):
                return cls, x

            @property
            def width(self):
                return 1

        class Child(Layer):
            pass

        TABLE = {"a": 1}
        NAMES = ["a"]
        KINDS = {"a"}

        class Box:
            def __init__(self):
                self.items = ("a",)

        BOX = Box()
        """,
    "importer": """
        from PACKAGE.origin import step
        from PACKAGE.origin import step as renamed

        class Loop:
            run = staticmethod(step)
            bare = step

        def call(x):
            return step(x)
        """,
    "late": """
        from PACKAGE.origin import step
        """,
}


@pytest.fixture
def toy(tmp_path):
    package = toy_package(tmp_path, SOURCES)
    yield package
    forget(package)


def add(word):
    """A wrapper that appends a word to the result, so that the order of wrappers shows."""

    def implementation(original):
        def step(x):
            return [*original(x), word]

        return step

    return implementation


def target(toy, path="step"):
    return f"{toy}.origin:{path}"


def drifted(manager_patch, **changes):
    """A store in which the recorded fingerprint differs from what is installed."""
    store = record([manager_patch])
    store.targets[manager_patch.target] = replace(store.targets[manager_patch.target], **changes)
    return store


def refused(manager, error):
    """apply_all raises, and nothing was changed."""
    with pytest.raises(error) as caught:
        manager.apply_all()
    assert not manager.applied and not manager.bindings
    return str(caught.value)


# -- resolving ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nothing:step", "cannot be imported"),
        ("origin:gone", "has no 'gone'"),
        ("origin:Gone.forward", "has no 'Gone'"),
        ("origin:Layer.gone", "has no 'Layer.gone'"),
        ("origin:Child.forward", "is inherited"),
        ("origin:Layer.width", "is a property"),
    ],
)
def test_a_missing_target_is_an_error_and_never_a_dummy(toy, path, words):
    bad = patch(f"{toy}.{path}", add("w"))
    manager = PatchManager([patch(target(toy), add("ok"), id="good"), bad], record([patch(target(toy), add("ok"))]))
    assert [s.state for s in manager.check_all()] == [PatchState.OK, PatchState.MISSING]
    assert words in refused(manager, MissingTarget)
    assert load(f"{toy}.origin").step(1) == [1]


def test_a_module_that_breaks_on_import_is_missing_whatever_it_raises(tmp_path):
    package = toy_package(tmp_path, {"broken": "raise OSError('libfoo.so.1: cannot open shared object file')"})
    status = PatchManager([patch(f"{package}.broken:f", add("w"))], record([])).check_all()[0]
    assert status.state is PatchState.MISSING and "OSError: libfoo.so.1" in status.message
    forget(package)


def test_a_target_without_a_recorded_fingerprint_is_refused(toy):
    text = refused(PatchManager([patch(target(toy), add("w"))], record([])), UnrecordedTarget)
    assert "python -m k3_plugins.patching.record" in text


def test_a_function_cannot_be_registered_and_a_table_cannot_be_wrapped(toy):
    wrong = [patch(target(toy), add("w"), REGISTER, id="a"), patch(target(toy, "TABLE"), add("w"), WRAP, id="b")]
    assert all(s.state is PatchState.SIGNATURE_DRIFT for s in PatchManager(wrong, record(wrong)).check_all())


# -- comparing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signature": "(x, y)"}, "signature of"),
        ({"module": "somewhere.else"}, "defining module of"),
        ({"kind": "class"}, "kind of"),
    ],
)
def test_signature_module_and_kind_drift_are_fatal_even_when_allowed(toy, changes, words):
    p = patch(target(toy), add("w"))
    for allow in ((), (p.id,)):
        text = refused(PatchManager([p], drifted(p, **changes), allow), SignatureDrift)
        assert words in text and p.id in text


def test_body_drift_is_fatal_and_says_how_to_allow_it(toy):
    p = patch(target(toy), add("w"))
    manager = PatchManager([p], drifted(p, body="0", lines=("0", "1")))
    assert f"--k3-allow-drift {p.id}" in refused(manager, BodyDrift)
    status = manager.check_all()[0]
    assert "+    return [x]" in status.diff and status.fatal


def test_body_drift_of_a_named_patch_is_applied_and_stays_visible(toy):
    p = patch(target(toy), add("w"))
    manager = PatchManager([p], drifted(p, body="0"), allow_drift=[p.id])
    manager.apply_all()
    assert load(f"{toy}.origin").step(1) == [1, "w"]
    assert manager.check_all()[0].state is PatchState.DRIFT_ALLOWED
    manager.rollback()


def test_allowing_the_drift_of_one_patch_does_not_allow_another(toy):
    first, second = patch(target(toy), add("w")), patch(target(toy, "other"), add("w"))
    store = drifted(first, body="0").merged(drifted(second, body="0"))
    assert second.id in refused(PatchManager([first, second], store, allow_drift=[first.id]), BodyDrift)


def test_allow_drift_must_name_a_patch(toy):
    p = patch(target(toy), add("w"))
    with pytest.raises(PatchError, match="names toy.stop, which is no patch.*toy.step"):
        PatchManager([p], record([p]), allow_drift=["toy.stop"])


def test_all_faults_are_reported_at_once_and_nothing_is_applied(toy):
    good = patch(target(toy), add("ok"))
    gone, drift = patch(target(toy, "gone"), add("w")), patch(target(toy, "other"), add("w"))
    store = record([good]).merged(drifted(drift, body="0"))
    text = refused(PatchManager([good, gone, drift], store), PatchError)
    assert "toy.gone" in text and "toy.other" in text
    assert load(f"{toy}.origin").step(1) == [1]


# -- applying ----------------------------------------------------------------------------------------------------------


def test_names_imported_from_the_target_are_rebound_everywhere(toy):
    importer = load(f"{toy}.importer")
    manager = PatchManager([p := patch(target(toy), add("w"))], record([p]))
    manager.apply_all()
    assert importer.step(1) == importer.renamed(1) == importer.call(1) == [1, "w"]
    assert importer.Loop.run(1) == [1, "w"] and importer.Loop().run(1) == [1, "w"]
    assert importer.Loop.bare(1) == [1, "w"]
    assert load(f"{toy}.late").step(1) == [1, "w"]  # imported after activation
    assert {b.name for b in manager.bindings_of(p)} == {"step", "renamed", "run", "bare"}
    manager.rollback()
    assert importer.step(1) == importer.renamed(1) == importer.Loop.run(1) == load(f"{toy}.origin").step(1) == [1]
    assert isinstance(vars(importer.Loop)["run"], staticmethod)


def test_recheck_finds_a_name_that_was_hidden_when_the_patch_was_applied(toy):
    original = load(f"{toy}.origin").step
    manager = PatchManager([p := patch(target(toy), add("w"))], record([p]))
    manager.apply_all()
    hidden = types.ModuleType(f"{toy}.hidden")  # a module that kept the original in a container and binds it later
    hidden.kept = original
    sys.modules[hidden.__name__] = hidden
    assert [b.where for b in manager.recheck()] == [hidden.__name__]
    assert hidden.kept(1) == [1, "w"]
    assert manager.recheck() == []
    manager.rollback()


def test_recheck_reports_who_rebound_a_target(toy):
    manager = PatchManager([p := patch(target(toy), add("w"))], record([p]))
    manager.apply_all()

    def intruder(x):
        return x

    load(f"{toy}.origin").step = intruder
    with pytest.raises(Overwritten, match=rf"toy\.step.*intruder.*module {__name__}"):
        manager.recheck()
    manager.rollback()


@pytest.mark.parametrize("path", ["Layer.forward", "Layer.helper", "Layer.make"])
def test_methods_keep_their_kind(toy, path):
    layer = load(f"{toy}.origin").Layer
    name = path.partition(".")[2]
    before = vars(layer)[name]
    seen = []

    def implementation(original):
        def method(*args):
            seen.append(args)
            return original(*args)

        return method

    manager = PatchManager([p := patch(target(toy, path), implementation)], record([p]))
    manager.apply_all()
    result = getattr(layer(), name)(5)
    assert type(vars(layer)[name]) is type(before)
    assert result == ((layer, 5) if name == "make" else 5) and len(seen) == 1
    manager.rollback()
    assert vars(layer)[name] is before


def test_wraps_stack_in_feature_order_around_the_one_replacement(toy):
    patches = [
        patch(target(toy), add("first"), id="a.step", feature="a"),
        patch(target(toy), lambda x: ["replaced"], REPLACE, id="b.step", feature="b"),
        patch(target(toy), add("last"), id="c.step", feature="c"),
    ]
    manager = PatchManager(patches, record(patches))
    manager.apply_all()
    assert load(f"{toy}.origin").step(1) == ["replaced", "first", "last"]
    manager.rollback()
    assert load(f"{toy}.origin").step(1) == [1]


def test_a_second_replacement_names_both_features(toy):
    patches = [patch(target(toy), add, REPLACE, id=f"{n}.step", feature=n) for n in ("one", "two")]
    with pytest.raises(DoubleReplace, match=r"one\.step \(feature one\) and two\.step \(feature two\)"):
        PatchManager(patches, record(patches[:1]))


def test_applying_again_does_nothing(toy):
    manager = PatchManager([p := patch(target(toy), add("w"))], record([p]))
    manager.apply_all()
    bindings = list(manager.bindings)
    manager.apply_all()
    assert load(f"{toy}.origin").step(1) == [1, "w"] and manager.bindings == bindings
    manager.rollback()
    manager.apply_all()  # and after a rollback it applies afresh
    assert load(f"{toy}.origin").step(1) == [1, "w"]
    manager.rollback()


def test_a_failure_in_the_middle_takes_everything_back(toy):
    origin, importer = load(f"{toy}.origin"), load(f"{toy}.importer")
    before = {**vars(origin)}, {**vars(importer)}, {**vars(importer.Loop)}, {**vars(origin.Layer)}

    def explode(original):
        raise KeyError("moved")

    patches = [
        patch(target(toy), add("w")),
        patch(target(toy, "Layer.forward"), lambda original: lambda self, x: x),
        patch(target(toy, "TABLE"), lambda table: table.update(b=2), REGISTER),
        patch(target(toy, "NAMES"), lambda names: names.append("b"), REGISTER),
        patch(target(toy, "other"), explode),
    ]
    text = refused(PatchManager(patches, record(patches)), PatchError)
    assert "toy.other" in text and "KeyError: 'moved'" in text and "taken back" in text
    after = {**vars(origin)}, {**vars(importer)}, {**vars(importer.Loop)}, {**vars(origin.Layer)}
    assert before == after
    assert origin.TABLE == {"a": 1} and origin.NAMES == ["a"]


def test_a_wrapper_that_returns_nothing_is_refused(toy):
    p = patch(target(toy), lambda original: None)
    assert "returned None instead of a callable" in refused(PatchManager([p], record([p])), PatchError)


def test_registries_get_entries_and_are_restored(toy):
    origin = load(f"{toy}.origin")

    def box(registry):
        old, registry.items = registry.items, (*registry.items, "b")
        return lambda: setattr(registry, "items", old)

    patches = [
        patch(target(toy, "TABLE"), lambda table: table.update(b=2), REGISTER),
        patch(target(toy, "NAMES"), lambda names: names.append("b"), REGISTER),
        patch(target(toy, "KINDS"), lambda kinds: kinds.add("b"), REGISTER),
        patch(target(toy, "BOX"), box, REGISTER),
    ]
    table = origin.TABLE
    manager = PatchManager(patches, record(patches))
    manager.apply_all()
    assert origin.TABLE is table and table == {"a": 1, "b": 2} and origin.NAMES == ["a", "b"]
    assert origin.KINDS == {"a", "b"} and origin.BOX.items == ("a", "b")
    manager.rollback()
    assert table == {"a": 1} and origin.NAMES == ["a"] and origin.KINDS == {"a"} and origin.BOX.items == ("a",)


def test_a_registry_of_another_type_must_say_how_to_undo(toy):
    p = patch(target(toy, "BOX"), lambda box: None, REGISTER)
    assert "must return a function that undoes" in refused(PatchManager([p], record([p])), PatchError)


def test_a_registration_that_fails_half_way_leaves_no_entry(toy):
    def half(table):
        table["b"] = 2
        raise RuntimeError("no")

    p = patch(target(toy, "TABLE"), half, REGISTER)
    refused(PatchManager([p], record([p])), PatchError)
    assert load(f"{toy}.origin").TABLE == {"a": 1}


# -- paperwork ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"reason": " "},
        {"remove_when": ""},
        {"id": ""},
        {"feature": ""},
        {"target": "no_colon"},
        {"target": "a.b:"},
        {"kind": "wrap"},
        {"implementation": None},
    ],
)
def test_a_patch_without_its_paperwork_is_refused(changes):
    values = dict(id="a.b", target="m:f", kind=WRAP, implementation=add, feature="a", reason="r", remove_when="w")
    with pytest.raises(ValueError, match="patch"):
        Patch(**{**values, **changes})


def test_two_patches_with_one_id_are_refused(toy):
    patches = [patch(target(toy), add("w"), feature=n) for n in ("one", "two")]
    with pytest.raises(PatchError, match="used by one and two"):
        PatchManager(patches, record(patches))
