"""What encoding an image or video costs: the FLOPs of the encoder's forward, as the throughput figure counts them."""

from k3_plugins.vision.dynamic_cp.balance import Sample
from k3_plugins.vision.moonvit.config import MoonViTConfig
from k3_plugins.vision.moonvit.flops import forward_flops
from k3_plugins.vision.moonvit.geometry import Clip


def sample_of(clip: Clip, config: MoonViTConfig, output_size: int) -> Sample:
    """A clip as the balance sees it.

    Attention is quadratic in the patches of a frame, and for a video in its frames; everything else is linear.

    Args:
        output_size: width of the language model.
    """
    return Sample(clip.patches, float(forward_flops(config, output_size, [clip])))
