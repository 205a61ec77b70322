"""What a process without features answers to code that needs one."""

import pytest

from k3_plugins import activation
from k3_plugins.feature import FeatureError
from tests.harness import toy_activation


def test_active_names_the_flag_when_no_feature_is_on():
    assert activation.current() is None
    with pytest.raises(FeatureError, match="--k3-plugins"):
        activation.active()


def test_active_is_the_current_activation():
    with toy_activation.active("kda") as toy:
        assert activation.active() is activation.current() is toy
