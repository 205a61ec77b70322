"""Fingerprints: what changes them, what does not, and what their difference looks like."""

import textwrap

import pytest

from k3_plugins.patching.fingerprint import FingerprintStore, diff, take
from k3_plugins.patching.target import resolve
from tests.contract.toys import forget, load, toy_package

BASE = '''
def step(a, b=2, *, c=None):
    """Documented."""
    total = a + b  # a comment
    return total


class Layer:
    """Documented."""

    def __init__(self, width, depth=1):
        self.width = width

    def forward(self, x):
        return x * self.width

    @staticmethod
    def scale(x):
        text = """a string
that starts in column 0"""
        return f"{x:<{x}}", text


REGISTRY = {"adam": 1}
'''


@pytest.fixture
def fingerprint(tmp_path):
    """Source -> fingerprint of a target in it."""
    made = []

    def compute(source, path):
        package = toy_package(tmp_path, {"m": source})
        made.append(package)
        print_ = take(resolve(f"{package}.m:{path}", "p"))
        return print_, package

    yield compute
    for package in made:
        forget(package)


def body(fingerprint, source, path):
    return fingerprint(source, path)[0].body


@pytest.mark.parametrize("path", ["step", "Layer", "Layer.forward", "Layer.scale"])
def test_docstrings_comments_and_formatting_do_not_count(fingerprint, path):
    other = BASE.replace('"""Documented."""', '"""Something else."""').replace("  # a comment", "")
    other = other.replace("a + b", "(a\n             + b)").replace("self.width = width", "self.width    =   width")
    before, after = fingerprint(BASE, path)[0], fingerprint(other, path)[0]
    assert (before.body, before.signature, before.lines) == (after.body, after.signature, after.lines)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("step", "a + b", "a - b"),
        ("step", "b=2", "b: int = 2"),  # an annotation is body, not signature
        ("Layer", "x * self.width", "x + self.width"),
        ("Layer.scale", "column 0", "column 1"),
        ("REGISTRY", '"adam": 1', '"adam": 2'),
    ],
)
def test_a_changed_body_changes_the_hash_and_not_the_signature(fingerprint, path, old, new):
    before, after = fingerprint(BASE, path)[0], fingerprint(BASE.replace(old, new), path)[0]
    assert before.body != after.body
    assert before.signature == after.signature


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [
        ("step", "b=2", "b=3"),
        ("step", "*, c=None", "c=None"),
        ("step", "a, b=2", "a, bb=2"),
        ("Layer", "depth=1", "height=1"),
        ("step", "def step", "async def step"),
        ("REGISTRY", '{"adam": 1}', '["adam"]'),
    ],
)
def test_a_changed_signature_is_seen(fingerprint, path, old, new):
    assert fingerprint(BASE, path)[0].signature != fingerprint(BASE.replace(old, new), path)[0].signature


def test_the_hash_is_the_same_under_every_supported_python(fingerprint):
    # A literal, so that the other Python version in CI compares with this one: recorded with 3.12.
    assert fingerprint(BASE, "step")[0].body == "1aa66816b38188d945b6933a701fccea9dd1f285939e03f96c5f5eca3b0408d1"
    assert fingerprint(BASE, "Layer")[0].body == "364106b1bd7d3bb2f3fbfa76779799415d5b02bdb27ecdecf3cf033af48969df"


def test_decorated_functions_are_read_behind_the_decorator(fingerprint):
    source = """
    import functools

    def loud(f):
        @functools.wraps(f)
        def inner(*args):
            return f(*args)
        return inner

    @loud
    def step(a, b):
        return a
    """
    found = fingerprint(source, "step")[0]
    assert found.signature == "(a, b)"
    assert found.body != body(fingerprint, source.replace("@loud\n", "\n"), "step")


def test_the_defining_module_of_a_reexported_function_is_recorded(tmp_path):
    package = toy_package(tmp_path, {"a": "def f(): return 1", "b": "from PACKAGE.a import f"})
    assert take(resolve(f"{package}.b:f", "p")).module == f"{package}.a"
    forget(package)


def test_diff_shows_new_lines_and_counts_lines_that_are_gone(fingerprint):
    recorded, _ = fingerprint(BASE, "step")
    changed = BASE.replace("    return total", "    total *= 2\n    return -total")
    _, package = fingerprint(changed, "step")
    text = diff(recorded, resolve(f"{package}.m:step", "p"), "1.0")
    assert text.splitlines()[0].startswith("---") and "as recorded with Megatron 1.0" in text
    assert "+    total *= 2" in text and "+    return -total" in text
    assert "-<1 recorded line not in the installed source>" in text
    assert "     total = a + b" in text  # context comes from the installed source


def test_a_store_survives_the_file(tmp_path, fingerprint):
    store = FingerprintStore({"m:step": fingerprint(BASE, "step")[0], "m:Layer": fingerprint(BASE, "Layer")[0]}, "1.0")
    store.write(tmp_path / "f.json")
    back = FingerprintStore.read(tmp_path / "f.json")
    assert back.targets == store.targets and back.version == "1.0"
    assert [p.name for p in tmp_path.glob("*.tmp")] == []


def test_a_store_holds_no_source_line(tmp_path, fingerprint):
    """Megatron's code must not be copied into this repository."""
    store = FingerprintStore({"m:Layer": fingerprint(BASE, "Layer")[0]}, "1.0")
    store.write(tmp_path / "f.json")
    text = (tmp_path / "f.json").read_text()
    assert not any(line.strip() in text for line in textwrap.dedent(BASE).splitlines() if len(line.strip()) > 12)
    assert "width" in text  # the signature is kept: it is what a caller may rely on


def test_a_registry_in_a_class_is_found(fingerprint):
    found, package = fingerprint("class Table:\n    known: dict = {'a': 1}\n", "Table.known")
    assert found.kind == "registry" and found.signature == "dict"
    assert load(f"{package}.m").Table.known == {"a": 1}
