"""Optional packages, probed in this one place.

    require("fla", "the fla backend of KDA")   # the module, or a FeatureError with the pip command
    probe("fla")                               # available or not, and the text of whatever it raised

Broken installations raise RuntimeError, OSError, FileNotFoundError and AttributeError as well as ImportError, so every
exception is caught here and its text is reported, never dropped.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from types import ModuleType

from k3_plugins.feature import FeatureError


@dataclass(frozen=True)
class OptionalPackage:
    """A package that some features can use."""

    module: str
    install: str
    """The command (or the advice) that installs the right one."""
    serves: str


PACKAGES = (
    OptionalPackage("fla", "pip install fla-core==0.6.0", "KDA kernels on GPUs, reference operators"),
    OptionalPackage(
        "transformer_engine",
        # With an underscore, pip finds an empty package whose presence breaks `import megatron.core`.
        "pip install 'transformer-engine[core-cu13,pytorch]'",
        "fused GPU layers, FP8",
    ),
    OptionalPackage(
        "apex",
        # The package index's "apex" is an unrelated project.
        "build NVIDIA apex from source (https://github.com/NVIDIA/apex); pip install apex is another package",
        "fused optimizers and gradient accumulation on GPUs",
    ),
    OptionalPackage("resvg_py", "pip install resvg-py==0.5.0", "rendering of generated SVG drawings"),
    OptionalPackage("megatron.energon", "pip install megatron-energon==7.4.1", "multimodal data loading"),
    OptionalPackage(
        "deepspeed", "pip install deepspeed==0.19.8", "CPU optimizer and asynchronous file I/O for offload"
    ),
    OptionalPackage(
        "mooncake.engine",
        "pip install mooncake-transfer-engine-non-cuda==0.3.13.post1 (with a GPU: mooncake-transfer-engine-cuda13)",
        "remote activation storage",
    ),
    OptionalPackage("emerging_optimizers", "pip install emerging-optimizers==0.3.0", "Newton-Schulz for Per-Head Muon"),
    OptionalPackage("numba", "pip install numba==0.68.1", "compiled planners of MoonEP and of vision bubbles"),
    OptionalPackage(
        "modelopt.torch.quantization",
        # The last two are needs that nvidia-modelopt does not declare.
        "pip install nvidia-modelopt==0.47.0 requests==2.34.2 huggingface-hub==2.4.0",
        "quantization-aware training",
    ),
    OptionalPackage("pybind11", "pip install pybind11==3.1.0", "data-set helpers of a Megatron-LM checkout"),
    OptionalPackage("transformers", "pip install transformers==5.24.0", "Hugging Face tokenizers and checkpoints"),
    OptionalPackage("sentencepiece", "pip install sentencepiece==0.2.3", "SentencePiece tokenizers"),
    OptionalPackage("tensorboard", "pip install tensorboard==2.21.0", "--tensorboard-dir"),
)


@dataclass(frozen=True)
class Probe:
    """What came of importing a package."""

    package: OptionalPackage
    available: bool
    installed: bool
    """Installed but not available means broken."""
    error: str
    """``ImportError: ...`` or the like; empty if it is available."""


@functools.cache
def probe(module: str) -> Probe:
    """Try to import an optional package.

    Raises:
        KeyError: for a module that :data:`PACKAGES` does not list.
    """
    package = {item.module: item for item in PACKAGES}[module]
    if not _is_installed(module):
        return Probe(package, available=False, installed=False, error="not installed")
    try:
        importlib.import_module(module)
    except Exception as error:
        return Probe(package, available=False, installed=True, error=f"{type(error).__name__}: {error}")
    return Probe(package, available=True, installed=True, error="")


def _is_installed(module: str) -> bool:
    """Whether there is something to import; looks up the parents' folders without failing on a missing parent."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
    except Exception:  # a parent package that breaks on import: it is installed, and probe() will report the error
        return True


def require(module: str, purpose: str) -> ModuleType:
    """Import an optional package that the user's choice needs.

    Args:
        module: one of :data:`PACKAGES`.
        purpose: what needs it, for the sentence.

    Raises:
        FeatureError: with the package's own error and the command to type.
    """
    result = probe(module)
    if not result.available:
        state = "is installed but broken" if result.installed else "is not installed"
        detail = f" ({result.error})" if result.installed else ""
        raise FeatureError(f"{purpose} needs {module}, which {state}{detail}: {result.package.install}")
    return importlib.import_module(module)
