"""Does the model look? The loss of each text after its own image, and after the image of another pair.

    python -m k3_plugins.vision.image_shuffle --load RUN/checkpoints --vision-data HELD_OUT_PAIRS

Each pair stands alone in its row, the image where it stands in training; the loss is the mean over text and end. A
shuffled image has the grid of patches of the right one wherever another pair has such an image, so that its length
tells nothing. The exit code is 1 unless the right images give the lower loss, by more than two standard errors.

Letters: s sequence, d width of the language model, M tokens and N patches of the image, P edge of a patch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3_plugins.atomic import replacing
from k3_plugins.failure import fail
from k3_plugins.feature import FeatureError
from k3_plugins.models.kimi_k3.hf_config import ConversionError

if TYPE_CHECKING:
    from k3_plugins.vision.moonvit.geometry import Clip
    from k3_plugins.vision.training.pairs import Pair

DOOR = "k3_plugins.vision.image_shuffle"
CERTAIN = 2.0
"""Standard errors by which the loss with the right images must be lower."""


@dataclass(frozen=True)
class Comparison:
    """Losses in nats per byte of text, averaged over pairs."""

    pairs: int
    same_grid: int
    """Pairs whose shuffled image has the grid of patches of their own."""
    right: float
    shuffled: float
    difference: float
    """Shuffled less right: positive if the model uses the images."""
    standard_error: float
    """Of the difference, over pairs."""

    @property
    def looks(self) -> bool:
        """Whether the right images help beyond chance."""
        return self.difference > CERTAIN * self.standard_error


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="checkpoint folder, as for training")
    parser.add_argument("--ckpt-step", type=int, help="this iteration instead of the latest")
    parser.add_argument("--vision-data", required=True, metavar="DIR", help="held-out pairs, as for training")
    parser.add_argument("--vision-text", default="txt", metavar="SUFFIX", help="the text: txt or svg (txt)")
    parser.add_argument("--count", type=int, help="only the first so many pairs")
    parser.add_argument("--seed", type=int, default=0, help="of the shuffling (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, pair by pair too")
    parser.add_argument("--k3-platform", choices=("cpu", "cuda", "auto"), help="where to compute")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both losses; 0 if the right images help, 1 if not, 2 with a sentence if it cannot be done."""
    args = arguments(argv)
    try:
        comparison, losses = run(args)
    except (ConversionError, FeatureError, ValueError) as error:
        fail(str(error))
    print(f"{comparison.pairs} pairs, {comparison.same_grid} of them shuffled within their grid of patches")
    print(f"text loss with the right image   {comparison.right:.4f}")
    print(f"text loss with a shuffled image  {comparison.shuffled:.4f}")
    print(
        f"difference                       {comparison.difference:.4f}"
        f" (standard error over pairs {comparison.standard_error:.4f})"
    )
    if args.json is not None:
        with replacing(args.json) as temporary:
            temporary.write_text(json.dumps({**asdict(comparison), "by_pair": losses}, indent=1) + "\n")
    if not comparison.looks:
        print(f"the right image does not help by more than {CERTAIN:g} standard errors: the model does not look")
    return 0 if comparison.looks else 1


def run(args: argparse.Namespace) -> tuple[Comparison, list[dict[str, Any]]]:
    """Load the checkpoint through Megatron, and compute both losses of every pair.

    Raises:
        ConversionError, FeatureError: with a sentence about the argument or the checkpoint.
    """
    if args.count is not None and args.count < 2:
        raise FeatureError(f"--count {args.count} must be at least 2: an image is exchanged for another one")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise FeatureError(f"--json {args.json}: its folder does not exist")

    from k3_plugins.models.kimi_k3 import checkpoint_model

    loaded = checkpoint_model.load(args.load, args.ckpt_step, args.k3_platform, DOOR)

    from k3_plugins.activation import active
    from k3_plugins.vision.training.pairs import find_pairs

    activation = active()
    if "moonvit" not in activation.names:
        raise FeatureError(f"--load {args.load}: this model was trained without moonvit, it sees no images")
    config = activation.config("moonvit")
    pairs = find_pairs(args.vision_data, config, args.vision_text, "--vision-data")[: args.count]
    if len(pairs) < 2:
        raise FeatureError(f"--vision-data {args.vision_data} holds {len(pairs)} pairs; at least 2 are needed")
    others = shuffled(pairs, args.seed)
    losses: list[dict[str, Any]] = [
        {
            "key": pair.key,
            "image": other.key,
            "right": text_loss(loaded.model, pair, pair, config),
            "shuffled": text_loss(loaded.model, pair, other, config),
        }
        for pair, other in zip(pairs, others, strict=True)
    ]
    same_grid = sum(pair.clip == other.clip for pair, other in zip(pairs, others, strict=True))
    return compare([row["right"] for row in losses], [row["shuffled"] for row in losses], same_grid), losses


def shuffled(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """For each pair another one, whose image it gets: the next in an order by grid, random among equal grids."""
    import numpy as np

    ranks = np.random.default_rng(seed).permutation(len(pairs))
    order = sorted(range(len(pairs)), key=lambda number: (*_clip(pairs[number]), ranks[number]))
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [pairs[following[number]] for number in range(len(pairs))]


def _clip(pair: Pair) -> Clip:
    """The size of a pair's image; `run` asks for pairs that have one."""
    assert pair.clip is not None
    return pair.clip


def text_loss(model: Any, text_of: Pair, image_of: Pair, config: Any) -> float:
    """Nats per byte of a text, its end included, with an image in the place of its own.

    Args:
        model: Megatron's ``GPTModel`` with its encoder, whole, in evaluation mode.
        config: the encoder's, read for the patch size.
    """
    import torch

    from k3_plugins.vision.training.pairs import read_patches, read_text
    from k3_plugins.vision.training.step import ENCODER, embed
    from k3_plugins.vision.training.tokens import END, IMAGE

    device = next(model.parameters()).device
    text = torch.from_numpy(read_text(text_of).copy()).long()
    before, clip = text_of.mark or 0, _clip(image_of)
    image = torch.full((clip.tokens,), IMAGE)
    row = torch.cat([text[:before], image, text[before:], torch.tensor([END])]).to(device)[None]
    tokens, labels = row[:, :-1], row[:, 1:]
    places = torch.arange(tokens.shape[1], device=device)
    with torch.no_grad():
        images = getattr(model, ENCODER)(read_patches(image_of, config).to(device), [clip])
        decoder_input = embed(model, tokens, places[None], images, places[before : before + clip.tokens])
        losses = model(tokens, places[None], None, decoder_input=decoder_input, labels=labels)
    return float(losses[labels != IMAGE].double().mean())


def compare(right: Sequence[float], other: Sequence[float], same_grid: int) -> Comparison:
    """Means over pairs, and the standard error of the paired difference."""
    differences = [two - one for one, two in zip(right, other, strict=True)]
    return Comparison(
        pairs=len(right),
        same_grid=same_grid,
        right=statistics.fmean(right),
        shuffled=statistics.fmean(other),
        difference=statistics.fmean(differences),
        standard_error=statistics.stdev(differences) / len(differences) ** 0.5,
    )


if __name__ == "__main__":
    sys.exit(main())
