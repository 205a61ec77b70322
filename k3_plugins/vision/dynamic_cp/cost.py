"""What encoding an image or video costs: multiplications and additions of the encoder's matrices, forward.

Letters: N patches of a clip, t frames, s patches of a frame, d width, i heads times head width, f MLP width, D width of
the language model.
"""

from k3_plugins.vision.dynamic_cp.balance import Sample
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.geometry import MERGE, Clip


def sample_of(clip: Clip, config: MoonViTConfig, output_size: int) -> Sample:
    """A clip as the balance sees it.

    Attention is quadratic in the patches of a frame, and for a video in its frames; everything else is linear.

    Args:
        output_size: D.
    """
    d, f = config.moonvit_hidden_size, config.moonvit_ffn_size
    i = config.moonvit_num_heads * config.moonvit_head_dim
    size = clip.h * clip.w
    projections = 8 * d * i  # q, k, v and the output
    block = projections + 4 * d * f + 4 * i * size
    if clip.t > 1:
        block += projections + 4 * i * clip.t
    embedding = 6 * config.moonvit_patch_size**2 * d
    projector = clip.tokens * 2 * MERGE**2 * d * (MERGE**2 * d + output_size)
    total = clip.patches * (embedding + config.moonvit_num_layers * block) + projector
    return Sample(clip.patches, float(total))
