"""What a target looked like when its patch was written, and whether it still does.

A fingerprint holds the signature (names, kinds and defaults of the parameters), a hash of the syntax tree without
docstrings, the defining module, and one short hash per line of the normalised source. The line hashes are enough to
show where the installed source differs; the source itself is Megatron's and is not copied.

Hashes do not depend on the Python version: the tree is walked here, because ``ast.dump`` prints empty fields in some
versions only.
"""

import ast
import copy
import difflib
import hashlib
import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k3_plugins.patching.target import Target, is_registry


@dataclass(frozen=True)
class Fingerprint:
    """The recorded properties of one target."""

    kind: str
    """``function``, ``class`` or ``registry``."""
    module: str
    """Where it is defined (differs from the target's module if it is only re-exported there)."""
    signature: str
    """``(a, b=None, *, c)``; for a class that of its ``__init__``; for a registry its type."""
    body: str
    """SHA-256 of the docstring-stripped syntax tree."""
    lines: tuple[str, ...]
    """One 8-digit hash per line of the normalised source."""


def take(target: Target) -> Fingerprint:
    """Compute the fingerprint of a resolved target.

    Raises:
        OSError: if Python cannot find the source (a compiled or generated object).
    """
    node, kind, module = _definition(target)
    _strip_docstrings(node)
    return Fingerprint(
        kind=kind,
        module=module,
        signature=_signature(node, target),
        body=_digest(canonical(node)),
        lines=tuple(_digest(line)[:8] for line in normalised_source(node)),
    )


def source_lines(target: Target) -> list[str]:
    """The normalised source of a target as it is installed."""
    node, _, _ = _definition(target)
    _strip_docstrings(node)
    return normalised_source(node)


def normalised_source(node: ast.AST) -> list[str]:
    """Source without comments, docstrings and formatting."""
    return ast.unparse(node).splitlines()


def canonical(node: Any) -> str:
    """A text of the syntax tree that is the same under every Python version that parses the source alike."""
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 ends a nested format specification with an empty piece, 3.13 does not.
        pieces = [piece for piece in node.values if not (isinstance(piece, ast.Constant) and piece.value == "")]
        return f"JoinedStr(values={canonical(pieces)})"
    if isinstance(node, ast.AST):
        parts = [f"{name}={canonical(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(canonical(item) for item in node)}]"
    return repr(node)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _definition(target: Target) -> tuple[ast.AST, str, str]:
    """The syntax node that defines a target, its kind and its module."""
    if is_registry(target.value):
        return _assignment(target), "registry", target.spec.partition(":")[0]
    value = inspect.unwrap(target.value)
    node = _parse(inspect.getsource(value))[0]
    kind = "class" if isinstance(target.value, type) else "function"
    return node, kind, value.__module__


def _parse(source: str) -> list[ast.stmt]:
    """Parse a source excerpt; a method's is indented, and dedenting would break its multi-line strings."""
    if source[:1] in (" ", "\t"):
        block = ast.parse(f"if True:\n{source}").body[0]
        assert isinstance(block, ast.If)
        return block.body
    return ast.parse(source).body


def _assignment(target: Target) -> ast.AST:
    """The last statement in the owner's source that binds the registry's name."""
    body = _parse(inspect.getsource(target.owner))
    if isinstance(target.owner, type):
        owner = body[0]
        assert isinstance(owner, ast.ClassDef)
        body = owner.body
    found = None
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(item, ast.Name) and item.id == target.name for item in targets):
            found = node
    if found is None:
        raise OSError(f"no assignment to {target.name!r} in the source of {target.owner!r}")
    return found


def _strip_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body = node.body[1:] or [ast.Pass()]


def _signature(node: ast.AST, target: Target) -> str:
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return _parameters(inits[0].args) if inits else "inherited"
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
        return prefix + _parameters(node.args)
    return type(target.value).__name__


def _parameters(arguments: ast.arguments) -> str:
    """Names, kinds and defaults; annotations do not change how a function is called, so they count as body."""
    bare = copy.deepcopy(arguments)
    for argument in ast.walk(bare):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return f"({ast.unparse(bare)})"


def diff(recorded: Fingerprint, target: Target, recorded_version: str) -> str:
    """Unified diff of recorded against installed. Lines that are gone are counted, for their text was not kept."""
    installed = source_lines(target)
    hashes = [_digest(line)[:8] for line in installed]
    out = [f"--- {target.spec} as recorded with Megatron {recorded_version}", f"+++ {target.spec} as installed"]
    matcher = difflib.SequenceMatcher(None, recorded.lines, hashes, autojunk=False)
    for group in matcher.get_grouped_opcodes(2):
        first, last = group[0], group[-1]
        out.append(f"@@ -{first[1] + 1},{last[2] - first[1]} +{first[3] + 1},{last[4] - first[3]} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                out += [f" {line}" for line in installed[j1:j2]]
                continue
            if i2 > i1:
                out.append(f"-<{i2 - i1} recorded line{'s' if i2 - i1 > 1 else ''} not in the installed source>")
            out += [f"+{line}" for line in installed[j1:j2]]
    return "\n".join(out)


class FingerprintStore:
    """Recorded fingerprints by target, from one JSON file or more."""

    def __init__(self, targets: Mapping[str, Fingerprint], version: str) -> None:
        self.targets = dict(targets)
        self.version = version

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "FingerprintStore":
        """Read a file written by :meth:`write`."""
        data = json.loads(Path(path).read_text())
        targets = {
            spec: Fingerprint(**{**entry, "lines": _split(entry["lines"])}) for spec, entry in data["targets"].items()
        }
        return cls(targets, data["megatron"])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write sorted JSON atomically, line hashes in rows so that a change shows as a small diff."""
        targets = {spec: {**asdict(entry), "lines": _rows(entry.lines)} for spec, entry in sorted(self.targets.items())}
        text = json.dumps({"megatron": self.version, "targets": targets}, indent=1) + "\n"
        temporary = Path(f"{path}.{os.getpid()}.tmp")
        temporary.write_text(text)
        os.replace(temporary, path)

    def merged(self, other: "FingerprintStore") -> "FingerprintStore":
        """This store with the targets of another one added; this one wins."""
        return FingerprintStore({**other.targets, **self.targets}, self.version)

    def get(self, spec: str) -> Fingerprint | None:
        """The fingerprint recorded for a target, or None."""
        return self.targets.get(spec)


def _rows(lines: tuple[str, ...], width: int = 10) -> list[str]:
    return [" ".join(lines[start : start + width]) for start in range(0, len(lines), width)]


def _split(rows: list[str]) -> tuple[str, ...]:
    return tuple(word for row in rows for word in row.split())
