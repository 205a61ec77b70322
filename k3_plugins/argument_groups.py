"""Megatron's ArgumentGroupFactory, for config modules that postpone the evaluation of their annotations.

Imports Megatron: only :func:`k3_plugins.arguments.extend_parser` imports this module, and only when a feature is on.
"""

import copy
import typing
from dataclasses import Field
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory


class FeatureArgumentGroupFactory(ArgumentGroupFactory):
    """Upstream reads ``field.type``, which is a string under ``from __future__ import annotations``."""

    def _build_argparse_kwargs_from_field(self, attribute: Field) -> dict[str, Any]:
        if isinstance(attribute.type, str):
            attribute = copy.copy(attribute)
            attribute.type = typing.get_type_hints(self.src_cfg_class)[attribute.name]
        return super()._build_argparse_kwargs_from_field(attribute)
