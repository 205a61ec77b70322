"""Documents that share a sequence: Megatron's older flags mean packed sequences in models with K3 layers.

``--reset-attention-mask`` and ``--reset-position-ids`` describe document boundaries by an S x S mask and by position
ids. KDA has no mask and reads neither: its state must be reset. Both flags therefore select Megatron's packed form
(``--dataloader-inter-document-masking``), whose ``cu_seqlens`` reach every layer on every pipeline stage.
"""

from argparse import Namespace

from k3_plugins.feature import FeatureError


def use_packed_documents(args: Namespace) -> None:
    """Set ``args`` so that document boundaries, if asked for, arrive as ``cu_seqlens``; no layer reads a mask.

    Raises:
        FeatureError: packed sequences with more than one row per micro-batch through a pipeline. Megatron flattens the
            rows to ``[b * s, 1, d]`` on the stages that see tokens, but its pipeline receives ``[s, b, d]``: the tokens
            would arrive in another order.
    """
    if args.reset_attention_mask or args.reset_position_ids:
        args.dataloader_inter_document_masking = True
    args.create_attention_mask_in_dataloader = False
    if args.dataloader_inter_document_masking and args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise FeatureError(
            f"--micro-batch-size {args.micro_batch_size} with packed documents (--reset-attention-mask, "
            "--reset-position-ids or --dataloader-inter-document-masking) cannot pass through Megatron's pipeline; use "
            "--micro-batch-size 1 and, for the same work per micro-batch, a longer --seq-length."
        )
