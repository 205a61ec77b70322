"""Generate ``docs/patches.md`` from the patches themselves.

python -m k3_plugins.patching.docs           # write it
python -m k3_plugins.patching.docs --check   # exit 1 if it is out of date
"""

import argparse
import os
from pathlib import Path

from k3_plugins import features
from k3_plugins.compat.megatron import VERIFIED_VERSION
from k3_plugins.engine import ENGINE_PATCHES
from k3_plugins.feature import Feature
from k3_plugins.patching.patch import Patch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "patches.md"

_HEAD = f"""# Patches

What the plug-in changes in Megatron-Core {VERIFIED_VERSION} at run time, and why no extension seam was enough.
Megatron's files are never edited. Without `--k3-plugins` there is no patch at all; with it, the engine's patches and
those of the features that were named. This page is generated: `python -m k3_plugins.patching.docs`.

Preferred in this order: an extension seam, an entry in a registry (`register`), a function around the original
(`wrap`), a replacement (`replace`).

## What happens at activation

1. Every target is resolved. A missing one ends the job.
2. Its signature, syntax tree (without docstrings) and defining module are compared with
   `k3_plugins/patching/fingerprints/`. Another signature or module ends the job. Another body ends it too, unless the
   patch is named in `--k3-allow-drift`. The version string decides nothing.
3. All patches are checked, then all are applied; if one fails, all are taken back.
4. Modules that imported a target by name are rebound, and looked at again after the model is built and after the first
   step.
5. A second replacement of the same target is refused; several wraps stack in feature order, the first one innermost.
   Activating twice does nothing the second time.
6. Before the first collective, features, configs, patches and versions are compared across ranks.
7. After the first training step every feature must show that it ran.

Whatever goes wrong ends all ranks with exit code 2 and a sentence that says what to type.
`python -m k3_plugins.doctor` does steps 1 and 2 alone and shows the differences.

After adding a patch: `python -m k3_plugins.patching.record`, then this generator, and commit both results.

`patches/` holds the one source patch, for those who prefer to start a Megatron-LM checkout's own `pretrain_gpt.py`:
`bash patches/apply.sh CHECKOUT` (and `--reverse`). It adds only the call that activates the features.
"""


def render() -> str:
    """The page as Markdown."""
    sections = [_HEAD, _section("engine", "Present whenever a feature is on.", list(ENGINE_PATCHES))]
    for entry in features.BUILT_IN:
        feature = features.load(entry)
        sections.append(_section(feature.name, f"{_sentence(entry.summary)} `{entry.folder}`.", _sorted(feature)))
    return "\n".join(sections)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _sorted(feature: Feature) -> list[Patch]:
    return sorted(feature.patches(), key=lambda patch: patch.id)


def _section(name: str, about: str, patches: list[Patch]) -> str:
    lines = [f"## {name}", "", about, ""]
    if not patches:
        return "\n".join([*lines, "Needs no patch.", ""])
    for patch in patches:
        lines += [
            f"- **{patch.id}** ({patch.kind.value}) `{patch.target}`",
            f"  - why: {patch.reason}",
            f"  - goes away when: {patch.remove_when}",
        ]
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m k3_plugins.patching.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args(argv)
    text = render()
    if options.check:
        same = PAGE.is_file() and PAGE.read_text() == text
        print(f"docs/{PAGE.name} is {'up to date' if same else 'out of date: python -m k3_plugins.patching.docs'}")
        return 0 if same else 1
    PAGE.parent.mkdir(exist_ok=True)
    temporary = PAGE.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, PAGE)
    print(f"docs/{PAGE.name} written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
