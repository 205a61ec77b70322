"""Symbols of the template as ids: the four reserved tokens are one id each, text is the tokenizer's.

Which tokenizer is told by Megatron's own flags, so that a pre-trained checkpoint is continued with the flags it had.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

from k3_plugins.data.tokenizers import BYTE_EOD, BYTE_VOCAB_SIZE
from k3_plugins.feature import FeatureError
from k3_plugins.post_training.xtml.symbols import Special, Symbol


@dataclass(frozen=True)
class TemplateTokenizer:
    """Ids of symbols."""

    text: Callable[[str], list[int]]
    """Ids of a text, in which names of reserved tokens are text like any other."""
    special: dict[Special, int]
    padding: int
    """What fills rows; no symbol has this id."""

    def ids(self, symbol: Symbol) -> list[int]:
        """Ids of one symbol.

        Raises:
            ValueError: if a text's ids hold a reserved token or the padding, which would forge structure.
        """
        if isinstance(symbol, Special):
            return [self.special[symbol]]
        ids = self.text(symbol)
        if not self._reserved.isdisjoint(ids):
            raise ValueError(
                "the tokenizer turns a text into a reserved token; remove the token's name from the text, or use a "
                "tokenizer that does not look for reserved tokens in texts"
            )
        return ids

    @property
    def _reserved(self) -> set[int]:
        return {*self.special.values(), self.padding}


def template_tokenizer(args: Namespace) -> TemplateTokenizer:
    """The tokenizer that ``--tokenizer-type`` and ``--tokenizer-model`` name.

    Args:
        args: Megatron's, with the padded vocabulary size.

    Raises:
        FeatureError: another kind of tokenizer, one without the reserved tokens, or a vocabulary without room for them.
    """
    kind = args.tokenizer_type
    if kind == "NullTokenizer" and args.vocab_size in (BYTE_VOCAB_SIZE, BYTE_VOCAB_SIZE + len(Special)):
        found = _bytes()
    elif kind == "HuggingFaceTokenizer":
        found = _hugging_face(str(args.tokenizer_model))
    elif kind == "SentencePieceTokenizer":
        found = _sentencepiece(str(args.tokenizer_model))
    else:
        raise FeatureError(
            f"--tokenizer-type {kind} does not say how text becomes ids; fine-tuning reads bytes (--tokenizer-type "
            f"NullTokenizer --vocab-size {BYTE_VOCAB_SIZE}), HuggingFaceTokenizer and SentencePieceTokenizer"
        )
    largest = max(found.special.values())
    if largest >= args.padded_vocab_size:
        raise FeatureError(
            f"the reserved tokens of the template need ids up to {largest}, and the model has "
            f"{args.padded_vocab_size} (--padded-vocab-size); give at least {largest + 1}"
        )
    return found


def _bytes() -> TemplateTokenizer:
    """Bytes, and the four ids behind the end of document, which pads."""
    special = {token: BYTE_VOCAB_SIZE + i for i, token in enumerate(Special)}
    return TemplateTokenizer(lambda text: list(text.encode("utf-8")), special, BYTE_EOD)


def _hugging_face(folder: str) -> TemplateTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # broken tokenizer files raise whatever their library raises
        raise FeatureError(f"--tokenizer-model {folder}: cannot be loaded: {error}") from error
    vocabulary = tokenizer.get_vocab()
    special = _present({token: vocabulary.get(token.value) for token in Special}, folder)
    if tokenizer.eos_token_id is None:
        raise FeatureError(f"--tokenizer-model {folder} has no eos_token, which pads rows; set it in its config")
    tokenizer.model_max_length = 1 << 62  # rows are measured here, not there

    def text(words: str) -> list[int]:
        return tokenizer.encode(words, add_special_tokens=False, split_special_tokens=True)

    return TemplateTokenizer(text, special, tokenizer.eos_token_id)


def _sentencepiece(file: str) -> TemplateTokenizer:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=file)
    except Exception as error:
        raise FeatureError(f"--tokenizer-model {file}: cannot be loaded: {error}") from error
    ids = {token: model.piece_to_id(token.value) for token in Special}
    special = _present({token: None if model.is_unknown(id) else id for token, id in ids.items()}, file)
    if model.eos_id() < 0:
        raise FeatureError(f"--tokenizer-model {file} has no end-of-sequence piece, which pads rows; train it with one")
    return TemplateTokenizer(model.encode_as_ids, special, model.eos_id())


def _present(special: dict[Special, int | None], model: str) -> dict[Special, int]:
    """The ids, if the model has all of them."""
    missing = [token.value for token, id in special.items() if id is None]
    if missing:
        raise FeatureError(
            f"--tokenizer-model {model} lacks the reserved tokens {' '.join(missing)} of the template: add them to it "
            "as special tokens, each with an id of its own"
        )
    return {token: id for token, id in special.items() if id is not None}
