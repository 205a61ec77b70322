"""The picture of the architecture holds every feature, with the patches it has now."""

import re
from pathlib import Path

from k3_plugins.features import BUILT_IN
from k3_plugins.report import architecture

PICTURE = Path(__file__).parents[3] / "docs" / "architecture.svg"


def test_every_feature_is_drawn_as_it_is(tmp_path):
    assert sorted(name for *_, names in architecture.PLACES for name in names) == sorted(e.name for e in BUILT_IN)
    assert architecture.main(["--output", str(tmp_path / "new.svg")]) == 0
    texts = [re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", file.read_text()) for file in (tmp_path / "new.svg", PICTURE)]
    assert len(texts[1]) > 2 * len(BUILT_IN)
    assert texts[0] == texts[1], "run python -m k3_plugins.report.architecture --output docs/architecture.svg"
