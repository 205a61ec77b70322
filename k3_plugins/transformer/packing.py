"""Documents that share a sequence: Megatron's older flags mean packed sequences in models with K3 layers.

``--reset-attention-mask`` and ``--reset-position-ids`` describe document boundaries by an S x S mask and by position
ids. KDA has no mask and reads neither: its state must be reset. Both flags therefore select Megatron's packed form
(``--dataloader-inter-document-masking``), whose ``cu_seqlens`` reach every layer on every pipeline stage.
"""

from argparse import Namespace


def use_packed_documents(args: Namespace) -> None:
    """Set ``args`` so that document boundaries, if asked for, arrive as ``cu_seqlens``; no layer reads a mask."""
    if args.reset_attention_mask or args.reset_position_ids:
        args.dataloader_inter_document_masking = True
    args.create_attention_mask_in_dataloader = False
