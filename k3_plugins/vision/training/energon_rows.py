"""Rows of interleaved image and text tokens out of a Megatron-Energon data set (``--vision-reader energon``).

Energon shuffles, shards over data-parallel ranks and workers, and keeps its state; here a sample is decoded and samples
are packed into rows as ``rows.py`` does. Samples are ``CaptioningSample``: an image, and a caption, which may say with
``<|media_pad|>`` where the image stands. The other ranks of a data-parallel rank (tensor, context, pipeline) read the
same stream with the same seeds, so that they agree on every row and on every sample that is left out.

Imports Energon: import this module after ``compat.optional.require``.

Letters: s sequence, N patches of a row, P edge of a patch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron import energon
from megatron.core import mpu
from megatron.training import get_args
from megatron.training.checkpointing import get_checkpoint_name
from torch import Tensor

from k3_plugins.feature import FeatureError
from k3_plugins.training.metrics import write
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import Clip, ImageError, patchify
from k3_plugins.vision.training.pairs import BadSample, decode, mark_of, too_long
from k3_plugins.vision.training.rows import Content, pack, row_of
from k3_plugins.vision.training.tokens import MARK

PACKED_FROM = 64
"""Samples that are packed at a time."""
SHUFFLED_FROM = 1000
"""Samples among which the next one is drawn, beside the order of shards."""


@energon.edataclass
class EncodedPair(energon.Sample):
    """A sample that fits a row."""

    patches: Tensor
    clip: Clip
    text: np.ndarray
    mark: int | None


class PairEncoder(energon.TaskEncoder):
    """Energon's hook: samples to patches and bytes, and those to rows.

    Args:
        config: sizes and limits of images.
        seq_length: s.
        skip_bad: leave out samples that cannot be trained on, and count them.
        images: whether rows hold their patches.
    """

    decoder = None  # the files' bytes: one decoder for all readers

    def __init__(self, config: MoonViTConfig, seq_length: int, skip_bad: bool, images: bool) -> None:
        self.config, self.seq_length, self.skip_bad, self.images = config, seq_length, skip_bad, images
        self._skipped = 0

    @energon.stateless
    def encode_sample(self, sample: energon.CaptioningSample) -> EncodedPair:
        """Decode and cut an image; what cannot be trained on is left out or ends the job."""
        name = f"sample {sample.__key__}"
        if not isinstance(sample, energon.CaptioningSample) or not isinstance(sample.image, bytes):
            raise ImageError(
                f"{name} is a {type(sample).__name__}; .nv-meta/dataset.yaml must describe a CaptioningSample with an"
                " image and a caption, as k3_plugins.data.render writes it"
            )
        try:
            return self._encoded(sample, name)
        except (ImageError, BadSample) as error:
            if not self.skip_bad:
                raise ImageError(str(error)) from error
            self._skipped += 1
            raise energon.SkipSample() from error

    def failed(self, error: Exception, sample: Any, sources: Sequence[energon.SourceInfo] | None = None) -> None:
        """Energon's hook for what it cannot read itself, a sample without its image or caption among it."""
        if not self.skip_bad:
            raise error if isinstance(error, ImageError) else ImageError(f"{_origin(sample, sources)}: {error}")
        self._skipped += 1

    def _encoded(self, sample: energon.CaptioningSample, name: str) -> EncodedPair:
        caption = sample.caption if isinstance(sample.caption, bytes) else sample.caption.encode()
        mark = mark_of(caption, 1, name)
        text = np.frombuffer(caption.replace(MARK, b"", 1), dtype=np.uint8)
        patches, clip = patchify(decode(sample.image, name), self.config, name)
        if long := too_long(name, clip.tokens, len(text), self.seq_length):
            raise long
        return EncodedPair.derive_from(sample, patches=patches, clip=clip, text=text, mark=mark)

    def select_samples_to_pack(self, samples: list[EncodedPair]) -> list[list[EncodedPair]]:
        """Neighbours that fit one row."""
        lengths = [sample.clip.tokens + len(sample.text) + 1 for sample in samples]
        return [[samples[k] for k in row] for row in pack(lengths, range(len(samples)), self.seq_length)]

    @energon.stateless
    def pack_selected_samples(self, samples: list[EncodedPair]) -> dict[str, Any]:
        """One row, with the number of samples left out since the one before."""
        row = row_of([Content(sample.text, sample.mark, sample.clip) for sample in samples], self.seq_length)
        if self.images:
            row["patches"] = torch.cat([sample.patches for sample in samples])
        row["skipped"] = torch.tensor(self._skipped)
        self._skipped = 0
        keys = ",".join(sample.__key__ for sample in samples)
        return {**row, "__key__": keys, "__restore_key__": tuple(sample.__restore_key__ for sample in samples)}

    def batch(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A micro-batch of one row, with a dimension in front as PyTorch's loader makes it."""
        (row,) = samples
        return {key: value[None] for key, value in row.items() if isinstance(value, Tensor)}


def _origin(sample: Any, sources: Sequence[energon.SourceInfo] | None) -> str:
    """Which sample Energon failed on, as far as it says."""
    if sources:
        return f"{sources[0].shard_name}: {', '.join(sources[0].file_names)}"
    key = sample.get("__key__") if isinstance(sample, dict) else getattr(sample, "__key__", None)
    return f"sample {key}" if key else "an unnamed sample"


class EnergonRows:
    """An endless iterator over rows; Megatron saves its state with ``--dataloader-save``.

    Args:
        folder: an Energon data set.
        flag: names the folder in messages, and the metric of samples left out.
        part: of the data set's split.
        encoder: what makes rows.
        shuffled: whether samples are drawn from a buffer; shards come in random order in any case.
    """

    def __init__(self, folder: str, flag: str, part: str, encoder: PairEncoder, shuffled: bool) -> None:
        args = get_args()
        if not (Path(folder) / ".nv-meta" / "split.yaml").is_file():
            raise FeatureError(
                f"{flag} {folder} is no prepared Energon data set (.nv-meta/split.yaml is missing): make one with"
                " --energon-split of k3_plugins.data.render, or with energon prepare"
            )
        workers = energon.WorkerConfig(
            rank=mpu.get_data_parallel_rank(),
            world_size=mpu.get_data_parallel_world_size(),
            num_workers=args.num_workers,
            data_parallel_group=mpu.get_data_parallel_group(),
            seed_offset=args.seed,
            global_error_handler=encoder.failed,
        )
        dataset = energon.get_train_dataset(
            folder,
            split_part=part,
            worker_config=workers,
            batch_size=1,
            shuffle_buffer_size=SHUFFLED_FROM if shuffled else None,
            max_samples_per_sequence=None,
            packing_buffer_size=PACKED_FROM,
            task_encoder=encoder,
        )
        self.flag, self.loader = flag, energon.get_savable_loader(dataset)
        self.skipped = 0
        self._rows: Iterator[dict[str, Tensor]] | None = None

    def restore(self, file: str) -> None:
        """Go on where a saved stream ended."""
        self.loader.restore_state_rank(torch.load(file, weights_only=False)["dataloader_state_dict"])

    def save_state(self) -> Any:
        """What Megatron saves for a data-parallel rank."""
        return self.loader.save_state_rank()

    def __iter__(self) -> EnergonRows:
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._rows is None:
            self._rows = iter(self.loader)
        row = next(self._rows)
        self._count(int(row.pop("skipped")))
        return row

    def _count(self, skipped: int) -> None:
        if not skipped:
            return
        self.skipped += skipped
        args = get_args()
        first = mpu.is_pipeline_first_stage(ignore_virtual=True) and mpu.get_context_parallel_rank() == 0
        if first and mpu.get_tensor_model_parallel_rank() == 0:
            rank = mpu.get_data_parallel_rank()
            print(f"> {self.flag}: {self.skipped} samples are left out so far on data-parallel rank {rank}", flush=True)
        write({f"k3/{self.flag.removeprefix('--')}-skipped": self.skipped}, args.curr_iteration)


def saved_state(iteration: int) -> str:
    """The file in which Megatron saved this data-parallel rank's stream.

    Raises:
        FeatureError: there is none to go on from.
    """
    args = get_args()
    if not args.dataloader_save:
        raise FeatureError(
            f"resuming at iteration {iteration}: Energon's stream would begin anew; give the --dataloader-save DIR of"
            " the saved run, or --finetune to start another run from the weights"
        )
    file = get_checkpoint_name(
        args.dataloader_save,
        iteration,
        pipeline_parallel=mpu.get_pipeline_model_parallel_world_size() > 1,
        tensor_rank=0,
        pipeline_rank=0,
        expert_parallel=False,
        expert_rank=0,
        basename=f"train_dataloader_dprank{mpu.get_data_parallel_rank():03d}.pt",
    )
    if not Path(file).is_file():
        raise FeatureError(
            f"--dataloader-save {args.dataloader_save}: there is no {file} to resume Energon's stream from"
        )
    return file


def energon_rows(
    train: str, valid: str | None, config: MoonViTConfig, skip_bad: bool, images: bool
) -> tuple[EnergonRows, EnergonRows | None]:
    """Training and validation rows of this data-parallel rank; validation goes on in its stream at every evaluation.

    Raises:
        FeatureError: a folder that is not prepared, or a run that cannot be resumed.
    """
    args = get_args()

    def encoder() -> PairEncoder:
        return PairEncoder(config, args.seq_length, skip_bad, images)

    rows = EnergonRows(train, "--vision-data", "train", encoder(), shuffled=True)
    if args.iteration > 0:
        rows.restore(saved_state(args.iteration))
    held_out = None if valid is None else EnergonRows(valid, "--vision-valid-data", "val", encoder(), shuffled=False)
    return rows, held_out
