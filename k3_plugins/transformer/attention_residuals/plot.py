"""Heat map of the mean source weights in a checkpoint.

    python -m k3_plugins.transformer.attention_residuals.plot CHECKPOINT [--output FILE.png]

CHECKPOINT is a directory given to --save (its latest iteration is taken) or one iteration's directory, in the
torch_dist format. Rows are aggregations in the order in which they run (A attention, M MLP, O output), columns are
sources (E the embedding, then the blocks; a block's running partial sum stands in the column of that block). Nothing is
evaluated: the weights were measured in training, when metrics were last written before the checkpoint.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from k3_plugins.atomic import replacing
from k3_plugins.manifest import TRACKER

_LAYER = re.compile(r"(?:.*\.)?decoder\.layers\.(?:(\d+)\.)?(self_attention_res|mlp_res)\.source_weights")
_OUTPUT = re.compile(r"(?:.*\.)?decoder\.output_res\.source_weights")


def iteration_directory(checkpoint: Path) -> Path:
    """The directory with the tensors: `checkpoint` itself or its latest iteration.

    Raises:
        FileNotFoundError: if there is no torch_dist checkpoint.
        ValueError: for a tracker file that names no iteration.
    """
    tracker = checkpoint / TRACKER
    directory = checkpoint
    if tracker.is_file():
        latest = tracker.read_text(errors="replace").strip()
        if latest != "release" and not latest.isdecimal():
            raise ValueError(f"{tracker} holds {latest[:40]!r} instead of an iteration; give one iteration's directory")
        directory = checkpoint / (latest if latest == "release" else f"iter_{int(latest):07d}")
    if not (directory / ".metadata").is_file():
        raise FileNotFoundError(
            f"{directory} is no checkpoint in the torch_dist format (it has no .metadata file); give the directory of"
            " --save of a run with --ckpt-format torch_dist"
        )
    return directory


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A pickle or archive that is cut short or damaged raises nearly any exception, and each is a bad file here."""
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException, with the causes by rank

    try:
        yield
    except (Exception, CheckpointException) as error:
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        text = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        raise ValueError(f"{path} cannot be read, is it damaged or incomplete? ({text})") from error


def read_source_weights(directory: Path) -> list[tuple[str, list[float]]]:
    """(row label, weights [max_sources]) of every aggregation, in the order in which they run.

    Raises:
        ValueError: if the checkpoint's model has no Attention Residuals, or the files are damaged.
    """
    import torch
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(str(directory))
    with _readable(directory / ".metadata"):
        entries = reader.read_metadata().state_dict_metadata
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and (_LAYER.fullmatch(key) or _OUTPUT.fullmatch(key))
    }
    if not tensors:
        raise ValueError(f"{directory} holds no source weights: was the model trained with attnres in --k3-plugins?")
    with _readable(directory):
        load(tensors, storage_reader=reader, no_dist=True)
    rows: dict[tuple[int, int], tuple[str, list[float]]] = {}
    for key, value in tensors.items():
        match = _LAYER.fullmatch(key)
        if match is None:
            rows[sys.maxsize, 0] = ("O", value.tolist())
            continue
        sublayer = match.group(2) == "mlp_res"
        # layers of one kind are stored as one tensor with the layer in front
        layers = [(int(match.group(1)), value)] if match.group(1) else list(enumerate(value))
        for layer, weights in layers:
            rows[layer, int(sublayer)] = (f"{layer} {'M' if sublayer else 'A'}", weights.tolist())
    return [rows[key] for key in sorted(rows)]


def draw(rows: list[tuple[str, list[float]]], output: Path) -> None:
    """Write the PNG (atomically). Cells without weight stay blank.

    Raises:
        RuntimeError: if matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise RuntimeError("the heat map needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    weights = np.array([row for _, row in rows])
    weights[weights == 0] = np.nan
    labels = ["E", *(str(block) for block in range(1, weights.shape[1]))]
    figure, axes = pyplot.subplots(figsize=(2 + 0.4 * weights.shape[1], 1.5 + 0.16 * len(rows)), layout="constrained")
    image = axes.imshow(weights, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=6)
    axes.set_xlabel("source (E embedding, then blocks)")
    axes.set_ylabel("layer and sublayer (A attention, M MLP, O output)")
    axes.set_title("mean source weight")
    figure.colorbar(image, ax=axes)
    try:
        with replacing(output) as temporary:
            figure.savefig(temporary, dpi=150, format="png")
    finally:
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path, default=Path("attnres.png"), help="PNG to write (default attnres.png)")
    options = parser.parse_args(argv)
    try:
        rows = read_source_weights(iteration_directory(options.checkpoint))
        if not any(any(row) for _, row in rows):
            raise ValueError(
                f"{options.checkpoint} was saved before any source weight was measured; train at least until metrics"
                " are written (--tensorboard-log-interval)"
            )
        draw(rows, options.output)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"attention residuals: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: {len(rows)} aggregations")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
