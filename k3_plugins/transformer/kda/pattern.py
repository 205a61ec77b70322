"""Which layers are KDA: Megatron's ``--linear-attention-freq``, with the K3 rule that full attention closes the stack.

Pure Python: planners and the model description read it without torch.
"""


def full_attention_pattern(num_layers: int, period: int, close: bool = True) -> list[int]:
    """Megatron's linear-attention pattern: 1 for a KDA layer, 0 for a full-attention layer.

    Args:
        num_layers: depth.
        period: every period-th layer is full attention (upstream's meaning of an integer ``--linear-attention-freq``).
        close: the last layer is full attention even when the depth is not a multiple of the period.
    """
    pattern = [0 if (i + 1) % period == 0 else 1 for i in range(num_layers)]
    if close and pattern:
        pattern[-1] = 0
    return pattern


def resolve_pattern(frequency: int | list[int] | None, num_layers: int, close: bool) -> list[int]:
    """The pattern for what the user gave as ``--linear-attention-freq`` (None: K3's 3 KDA to 1 full attention).

    Raises:
        ValueError: a frequency below 1, a pattern of the wrong length, or entries other than 0 and 1.
    """
    if frequency is None:
        frequency = 4
    if isinstance(frequency, int):
        if frequency < 1:
            raise ValueError(f"--linear-attention-freq {frequency} must be at least 1 (4: three KDA, then one full).")
        return full_attention_pattern(num_layers, frequency, close)
    if len(frequency) != num_layers:
        raise ValueError(
            f"--linear-attention-freq lists {len(frequency)} layers but --num-layers is {num_layers}; give one entry "
            "per layer (1 = KDA, 0 = full attention)."
        )
    if set(frequency) - {0, 1}:
        raise ValueError(f"--linear-attention-freq has entries other than 0 and 1: {frequency}.")
    return list(frequency)
