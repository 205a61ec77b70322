"""Continue a prompt from a checkpoint.

    python -m k3_plugins.models.kimi_k3.generate --load CHECKPOINT --prompt "Once upon a time" --max-new-tokens 200

Runs in one process, on a checkpoint saved under any parallel layout. KDA layers carry a state of constant size, MLA
layers a cache of latents; the result is that of the whole forward pass. Greedy unless --temperature is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from k3_plugins.failure import fail
from k3_plugins.feature import FeatureError
from k3_plugins.models.kimi_k3.hf_config import ConversionError
from k3_plugins.models.kimi_k3.sampling import Sampling

DOOR = "k3_plugins.models.kimi_k3.generate"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {DOOR}", description=__doc__.splitlines()[0])
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="checkpoint folder, as for training")
    parser.add_argument("--ckpt-step", type=int, help="this iteration instead of the latest")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--prompt-ids", metavar="ID,ID,...", help="token ids to continue; ids are printed as well")
    parser.add_argument("--tokenizer", metavar="SPEC", help="byte, hf:FOLDER or sp:FILE; by default the checkpoint's")
    parser.add_argument("--max-new-tokens", type=int, default=100, help="stop after so many tokens (100)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) takes the most likely token")
    parser.add_argument("--top-k", type=int, default=0, help="sample among the so many most likely tokens; 0: all")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among the likeliest, up to this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    parser.add_argument("--k3-platform", choices=("cpu", "cuda", "auto"), help="where to compute")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the prompt and its continuation; returns the exit code (2, with a message, if it cannot be done)."""
    args = arguments(argv)
    try:
        run(args)
    except (ConversionError, FeatureError, ValueError) as error:
        fail(str(error))
    return 0


def run(args: argparse.Namespace) -> None:
    """Load, generate, print: the text on stdout, the figures on stderr.

    Raises:
        ConversionError, FeatureError, ValueError: with a sentence about the argument or the checkpoint.
    """
    given = _ids(args.prompt_ids) if args.prompt_ids is not None else None
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: give a number of at least 1")
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    if args.prompt is not None and not _is_text(args.prompt):
        raise ValueError(f"--prompt {args.prompt!a}: it has bytes that are no UTF-8; give a text, or use --prompt-ids")

    from k3_plugins.models.kimi_k3 import checkpoint_model

    loaded = checkpoint_model.load(args.load, args.ckpt_step, args.k3_platform, DOOR)

    from k3_plugins.models.kimi_k3.generation import GenerationState, continuation
    from k3_plugins.models.kimi_k3.text import Codec, codec_for

    codec: Codec | None = None
    if given is None:
        codec = codec_for(loaded.saved, loaded.iteration, args.tokenizer)
        # A text that is empty begins like every document: after the end of another.
        ids = codec.encode(args.prompt) or [codec.end]
    else:
        ids = given
    device = next(loaded.model.parameters()).device
    start = time.perf_counter()
    with GenerationState(loaded.model) as state:
        new = list(
            continuation(
                state,
                ids,
                args.max_new_tokens,
                vocab_size=loaded.args.vocab_size,
                sampling=sampling,
                stop=() if codec is None else (codec.end,),
                device=device,
            )
        )
    seconds = time.perf_counter() - start
    print(",".join(map(str, [*ids, *new])) if codec is None else codec.continued(args.prompt, ids, new), flush=True)
    print(
        f"{len(ids)} prompt tokens, {len(new)} new tokens in {seconds:.1f} s; KDA state {state.kda_bytes} bytes, "
        f"MLA latents {state.latent_bytes} bytes",
        file=sys.stderr,
    )


def _is_text(prompt: str) -> bool:
    """Whether it has an encoding; bytes of the command line that are no UTF-8 become lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in prompt)


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise ValueError(f"--prompt-ids {text!r}: give whole numbers separated by commas") from error


if __name__ == "__main__":
    sys.exit(main())
