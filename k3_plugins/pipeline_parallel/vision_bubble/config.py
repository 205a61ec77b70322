"""Flags of the bubble scheduler. This module imports neither torch nor megatron."""

import math
from dataclasses import dataclass, field

from k3_plugins.feature import FeatureError

_TIMING = {"changes_parameters": False}


@dataclass(frozen=True)
class VisionBubbleConfig:
    """Encoder work in pipeline bubbles."""

    vision_bubble_times: str = field(default="measured", metadata=_TIMING)
    """What is planned with: "measured", or four times in any unit, F,B,E,G: forward and backward of the text of one
    model chunk, and encoder forward and backward of a step's average micro-batch."""

    vision_bubble_measure_steps: int = field(default=3, metadata=_TIMING)
    """How many of the first steps with images are measured; later ones are planned with the last one's times."""

    vision_bubble_pieces: int = field(default=9, metadata=_TIMING)
    """Into how many parts of whole layers an encoder backward is split; at most one for each layer."""

    @property
    def given_times(self) -> tuple[float, float, float, float] | None:
        """The four numbers, or None if times are measured.

        Raises:
            FeatureError: for anything else.
        """
        if self.vision_bubble_times == "measured":
            return None
        try:
            times = tuple(float(word) for word in self.vision_bubble_times.split(","))
        except ValueError:
            times = ()
        if len(times) != 4 or not all(math.isfinite(time) and time > 0 for time in times):
            raise FeatureError(
                f"--vision-bubble-times {self.vision_bubble_times} must be 'measured' or four positive numbers"
                " F,B,E,G: forward and backward of one model chunk's text, encoder forward and backward of an average"
                " micro-batch"
            )
        return times
