"""``dataset.json``: what lies in a data set folder, for people, for the report and for the Megatron flags.

A data set folder holds ``train.bin``/``.idx``, ``validation.bin``/``.idx`` (unless no validation split was asked for),
``dataset.json`` and, when anything was left out, ``skipped.jsonl`` with one line for each.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from k3_plugins.data.sources import InputError
from k3_plugins.data.tokenizers import TokenizerInfo

FILE_NAME = "dataset.json"
FORMAT = 1


@dataclass(frozen=True)
class SplitInfo:
    """Counts of one split: documents, ids (end-of-document ids included), bytes of UTF-8 text; digest of the ids."""

    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class DatasetInfo:
    """The contents of ``dataset.json``. ``skipped`` counts by reason what was looked at and left out."""

    tokenizer: TokenizerInfo
    splits: dict[str, SplitInfo]
    validation_fraction: float
    seed: int
    skipped: dict[str, int] = field(default_factory=dict)

    def tokens_per_byte(self, split: str) -> float:
        """Converts a loss per id into a loss per byte of text: end-of-document ids cost bits but hold no byte."""
        return self.splits[split].tokens / self.splits[split].bytes

    def megatron_flags(self, folder: str | os.PathLike) -> list[str]:
        """The flags that make Megatron's ``pretrain`` use the data set in ``folder``.

        There is no test split on purpose: Megatron 0.19.2 writes its test loss over the last validation loss.
        """
        flags = ["--train-data-path", os.path.join(folder, "train")]
        if "validation" in self.splits:
            flags += ["--valid-data-path", os.path.join(folder, "validation")]
        return flags + self.tokenizer.megatron_flags


def write(info: DatasetInfo, folder: Path, final_folder: str) -> None:
    """Writes ``dataset.json`` into ``folder``, with the flags as they hold once it stands at ``final_folder``."""
    record = {"format": FORMAT, **asdict(info), "megatron_flags": info.megatron_flags(final_folder)}
    record["tokenizer"]["padded_vocab_size"] = info.tokenizer.padded_vocab_size
    (folder / FILE_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def read(folder: str | os.PathLike) -> DatasetInfo:
    """Reads the sidecar of a data set folder.

    Raises:
        InputError: there is none, or it is damaged or of another format.
    """
    path = Path(folder) / FILE_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["format"] != FORMAT:
            raise InputError(f"{path} has format {record['format']!r}, not {FORMAT}: prepare the data again")
        tokenizer = record["tokenizer"]
        return DatasetInfo(
            tokenizer=TokenizerInfo(*(tokenizer[key] for key in ("kind", "model", "vocab_size", "eod_id"))),
            splits={name: SplitInfo(**split) for name, split in record["splits"].items()},
            validation_fraction=record["validation_fraction"],
            seed=record["seed"],
            skipped=record["skipped"],
        )
    except FileNotFoundError as error:
        raise InputError(
            f"{os.fspath(folder)!r} holds no {FILE_NAME}: name a folder made by python -m k3_plugins.data.prepare"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read ({error}): prepare the data again") from error
