"""Text <-> ids with the tokenizer a checkpoint was trained with.

    codec = codec_for(saved_args, iteration_folder, spec=None)
    codec.encode("text"), codec.decode([...]), codec.end
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3_plugins.data.sources import InputError
from k3_plugins.data.tokenizers import BYTE_EOD, BYTE_VOCAB_SIZE, Tokenizer
from k3_plugins.models.kimi_k3 import hf_folder
from k3_plugins.models.kimi_k3.hf_config import ConversionError


@dataclass(frozen=True)
class Codec:
    """A tokenizer, both ways."""

    encode: Callable[[str], list[int]]
    """Ids of a text, without an end of document."""
    decode: Callable[[Sequence[int]], str]
    """Text of ids; bytes that are no UTF-8 become replacement characters."""
    end: int
    """The end of a document."""

    def continued(self, prompt: str, ids: Sequence[int], new: Sequence[int]) -> str:
        """The prompt as it was typed, and the text that ``new`` adds to it.

        What new ids spell depends on what stands before them: SentencePiece drops the space in front of the first word
        of a text, and pieces that are single bytes make a character together. So prompt and continuation are decoded
        as one text, of which the prompt's part is cut off.

        Args:
            prompt: a text.
            ids: its ids.
            new: ids that follow.

        Returns:
            the whole text. If the prompt's end reads otherwise with the new ids behind it (a tokenizer that cleans up
            spaces), it is the tokenizer's spelling of everything.
        """
        before, whole = self.decode(ids), self.decode([*ids, *new])
        return prompt + whole[len(before) :] if whole.startswith(before) else whole


def codec_for(saved: Namespace, iteration: Path, spec: str | None = None) -> Codec:
    """The tokenizer of a checkpoint.

    Args:
        saved: the arguments saved with it.
        iteration: its folder, which holds the tokenizer of a converted checkpoint.
        spec: ``byte``, ``hf:FOLDER`` or ``sp:FILE`` instead.

    Raises:
        ConversionError: if the checkpoint does not tell, or the tokenizer cannot be loaded.
    """
    spec = spec or _specification(saved, iteration)
    try:
        tokenizer = Tokenizer(spec)
    except InputError as error:
        raise ConversionError(str(error)) from error
    limit = saved.vocab_size or saved.padded_vocab_size
    if tokenizer.info.vocab_size > limit:
        raise ConversionError(
            f"--tokenizer {spec} has {tokenizer.info.vocab_size} ids, the model {limit}: it was trained with another"
        )

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text.encode("utf-8")).tolist()[:-1]

    return Codec(encode, _decoder(tokenizer), tokenizer.info.eod_id)


def _specification(saved: Namespace, iteration: Path) -> str:
    kind, model = saved.tokenizer_type, saved.tokenizer_model
    if kind == "NullTokenizer" and saved.vocab_size == BYTE_VOCAB_SIZE:
        return "byte"
    if kind == "HuggingFaceTokenizer":
        copied = iteration / hf_folder.SIDECAR_FOLDER
        return f"hf:{copied if hf_folder.has_tokenizer(copied) else model}"
    if kind == "SentencePieceTokenizer":
        return f"sp:{model}"
    raise ConversionError(
        f"the checkpoint was trained with {kind} and does not say how text becomes ids: pass --tokenizer byte, "
        "hf:FOLDER or sp:FILE, or give ids with --prompt-ids"
    )


def _decoder(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    kind, model = tokenizer.info.kind, tokenizer.info.model
    if kind == "byte":
        return lambda ids: bytes(id for id in ids if id != BYTE_EOD).decode("utf-8", errors="replace")
    if kind == "hf":
        from transformers import AutoTokenizer

        loaded: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)  # typed as if it gave lists too
        return loaded.decode
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=model)
    return lambda ids: processor.decode(list(ids))
