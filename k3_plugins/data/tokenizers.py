"""Tokenizers of a data set, each tied to the Megatron flags under which training reads the same ids.

``byte`` (the default) needs no file and no download: id = byte value, 256 = end of document. Megatron 0.19.2 has a
byte-level tokenizer class, but no ``--tokenizer-type`` reaches it, and its end-of-document and padding ids are the
bytes 0 and 1; its ``NullTokenizer`` with 257 ids, end of document last and no padding id, is exactly this vocabulary.

``hf:DIR`` and ``sp:FILE`` are read with their own libraries, and checked against what Megatron builds from the flags.
"""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from k3_plugins.data.megatron_import import import_megatron
from k3_plugins.data.sources import InputError

BYTE_VOCAB_SIZE = 257
BYTE_EOD = 256
# Padded to a multiple that every sensible tensor-parallel size divides: then the embedding has one shape under all of
# them, and a checkpoint moves between layouts. (Megatron's own default padding depends on the tensor-parallel size.)
PADDING_MULTIPLE = 64


@dataclass(frozen=True)
class TokenizerInfo:
    """What the sidecar records and training must agree with.

    ``kind`` is ``byte``, ``hf`` or ``sp``; ``model`` the folder or file it was built from (None for ``byte``).
    """

    kind: str
    model: str | None
    vocab_size: int
    eod_id: int

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // PADDING_MULTIPLE) * PADDING_MULTIPLE

    @property
    def megatron_flags(self) -> list[str]:
        """The flags under which Megatron's training uses this tokenizer."""
        flags = {
            "byte": ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(self.vocab_size)],
            "hf": [
                "--tokenizer-type",
                "HuggingFaceTokenizer",
                "--tokenizer-hf-no-include-special-tokens",
                "--tokenizer-model",
                str(self.model),
            ],
            "sp": ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(self.model)],
        }[self.kind]
        return [*flags, "--padded-vocab-size", str(self.padded_vocab_size)]


class Tokenizer:
    """Encodes UTF-8 bytes as ids. ``spec`` is ``byte``, ``hf:DIR`` or ``sp:FILE``.

    It calls the tokenizer's own library, so that workers start without torch and Megatron; ``check_against_megatron``
    makes sure, once, that training will read the ids with the same vocabulary and end of document.

    Raises:
        InputError: the specification, the folder or the file cannot be used.
    """

    def __init__(self, spec: str) -> None:
        kind, _, model = spec.partition(":")
        if kind == "byte" and not model:
            self.info = TokenizerInfo("byte", None, BYTE_VOCAB_SIZE, BYTE_EOD)
            return
        if kind not in ("hf", "sp") or not model:
            raise InputError(f"--tokenizer {spec!r}: give 'byte', 'hf:FOLDER' or 'sp:FILE'")
        vocab_size, eod, self._encode = (_load_hugging_face if kind == "hf" else _load_sentencepiece)(model, spec)
        if eod is None or not 0 <= eod < vocab_size:
            raise InputError(
                f"--tokenizer {spec!r} has no end-of-sequence token, which Megatron needs between documents: "
                "set eos_token in its tokenizer_config.json, or train the SentencePiece model with an eos_id"
            )
        self.info = TokenizerInfo(kind, model, vocab_size, eod)

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of one document, end of document included.

        Args:
            text: valid UTF-8.
        Returns:
            int32 array ``[tokens]``.
        """
        encoded = np.frombuffer(text, np.uint8) if self.info.kind == "byte" else self._encode(text.decode("utf-8"))
        ids = np.empty(len(encoded) + 1, dtype=np.int32)
        ids[:-1] = encoded
        ids[-1] = self.info.eod_id
        return ids


def _load_hugging_face(folder: str, spec: str) -> tuple[int, int | None, Callable[[str], list[int]]]:
    """Vocabulary size, end-of-sequence id and encoder (no special tokens are put around a document)."""
    if not os.path.isdir(folder):
        # A bare name would make the library ask a server; a data set is made from what is on this disk.
        raise InputError(f"--tokenizer {spec!r}: {folder!r} is not a folder with a Hugging Face tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise InputError(f"--tokenizer {spec!r} needs transformers ({error}): pip install transformers") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # Broken tokenizer files raise whatever their library raises.
        raise InputError(f"--tokenizer {spec!r}: cannot be loaded: {error}") from error
    # A document is cut into sequences later: its length is not the model's business, nor worth a warning each.
    tokenizer.model_max_length = 1 << 62
    return len(tokenizer), tokenizer.eos_token_id, lambda text: tokenizer.encode(text, add_special_tokens=False)


def _load_sentencepiece(file: str, spec: str) -> tuple[int, int | None, Callable[[str], list[int]]]:
    """Vocabulary size, end-of-sequence id (negative if there is none) and encoder."""
    if not os.path.isfile(file):
        raise InputError(f"--tokenizer {spec!r}: {file!r} is not a SentencePiece model file")
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise InputError(f"--tokenizer {spec!r} needs sentencepiece ({error}): pip install sentencepiece") from error
    try:
        model = SentencePieceProcessor(model_file=file)
    except Exception as error:
        raise InputError(f"--tokenizer {spec!r}: cannot be loaded: {error}") from error
    return model.get_piece_size(), model.eos_id(), model.encode_as_ids


def check_against_megatron(info: TokenizerInfo) -> None:
    """Builds Megatron's tokenizer from ``info.megatron_flags`` and compares vocabulary size and end of document.

    Raises:
        InputError: training would read the ids with another vocabulary or end of document.
    """
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_tokenizer_args = import_megatron("megatron.training.arguments", "to check the tokenizer")._add_tokenizer_args
    module = import_megatron("megatron.core.tokenizers.utils.build_tokenizer", "to check the tokenizer")
    training = module.build_tokenizer(add_tokenizer_args(parser).parse_args(info.megatron_flags))
    if (training.vocab_size, training.eod) != (info.vocab_size, info.eod_id):
        raise InputError(
            f"the tokenizer {info.model!r} has {info.vocab_size} ids and end of document {info.eod_id}, but Megatron's "
            f"{info.megatron_flags[1]} reads it as {training.vocab_size} and {training.eod}: it cannot be used to train"
        )
