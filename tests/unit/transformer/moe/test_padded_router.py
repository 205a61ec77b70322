"""The expert-bias rule's counts leave padding out."""

import torch

from k3_plugins.transformer.moe.router import PaddedTopKRouter


def counts(routing_map, padding):
    router = PaddedTopKRouter.__new__(PaddedTopKRouter)
    torch.nn.Module.__init__(router)
    router.enable_expert_bias = True
    router.local_tokens_per_expert = torch.zeros(routing_map.shape[1])
    router._apply_expert_bias(routing_map, padding_mask=padding)
    return router.local_tokens_per_expert.tolist()


def test_padding_is_not_counted():
    routing_map = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    assert counts(routing_map, None) == [3, 2, 3]
    assert counts(routing_map, torch.tensor([False, True, False, True])) == [2, 1, 1]
    assert counts(routing_map, torch.ones(4, dtype=torch.bool)) == [0, 0, 0]
    # As many tokens as experts: the shapes would fit the wrong way round too.
    assert counts(routing_map[:3], torch.tensor([False, False, True])) == [1, 1, 2]
