"""What a run did: a picture of its losses and a JSON summary, from the TensorBoard files that Megatron wrote.

``python -m k3_plugins.report RUN`` reports on one run, ``python -m k3_plugins.report.compare A B`` says whether two
runs computed the same numbers, bit for bit. ``write_report`` is the same for a trainer to call when it is done.
"""

from k3_plugins.report.events import ReportError
from k3_plugins.report.write import write_report

__all__ = ["ReportError", "write_report"]
