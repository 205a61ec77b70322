"""ModelOpt's view of our stacked experts: the quantizers of their two GEMMs.

ModelOpt knows linear layers and refuses parameters with three dimensions; its registry takes a module of another kind
with a class that says which quantizers it has. The quantizers are the rounding of `GroupedExperts`, so the experts, the
balanced layer of MoonEP and its slots use them alike.
"""

from __future__ import annotations

import modelopt.torch.quantization as mtq
from modelopt.torch.quantization.nn import QuantModule, QuantModuleRegistry, TensorQuantizer
from modelopt.torch.utils.distributed import ParallelState

from k3_plugins.transformer.moe.experts import GroupedExperts
from k3_plugins.transformer.moe.ops.rounding import Rounding


class QuantGroupedExperts(QuantModule):
    """What ModelOpt puts in front of `GroupedExperts` in the class of a converted module."""

    def _setup(self) -> None:
        self.parallel_state = ParallelState(self.dp_group, self.tp_group, self.ep_group)
        for linear in ("linear_fc1", "linear_fc2"):
            setattr(self, f"{linear}_input_quantizer", TensorQuantizer())
            setattr(self, f"{linear}_weight_quantizer", TensorQuantizer())

    @property
    def rounding(self) -> Rounding:
        """See `GroupedExperts.rounding`."""
        return Rounding(
            input1=self.linear_fc1_input_quantizer,
            weight1=self.linear_fc1_weight_quantizer,
            input2=self.linear_fc2_input_quantizer,
            weight2=self.linear_fc2_weight_quantizer,
        )


def register() -> None:
    """Make the class known to ModelOpt; a second call changes nothing."""
    if GroupedExperts not in QuantModuleRegistry:
        mtq.register(original_cls=GroupedExperts, quantized_cls=QuantGroupedExperts)
