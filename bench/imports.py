"""Benchmark of importing the agent's modules.

For comparison: the bare interpreter, and the official Kubernetes client, which the agent does not
use.
"""

from collections.abc import Iterator

from bench.interpreter import ProcessCost, measure_cost
from bench.result import Result

STATUS = "import treenail.cli.main, treenail.cli.node.status"
AGENT = "import treenail.cli.main, treenail.cli.node.run"
OFFICIAL = "import kubernetes.client; kubernetes.client.CoreV1Api"


def measure(_seconds: float) -> Iterator[Result]:
    yield from _build_results("bare interpreter", measure_cost("pass"))
    yield from _build_results("modules of treenail status", measure_cost(STATUS))
    yield from _build_results("modules of the agent", measure_cost(AGENT), max_rss_mib=40.0)
    yield from _build_results("official client alone", measure_cost(OFFICIAL))


def _build_results(
    name: str, found: ProcessCost, *, max_rss_mib: float | None = None
) -> Iterator[Result]:
    yield Result(f"{name}: import", "ms", found.duration_s * 1000)
    yield Result(f"{name}: RSS", "MiB", found.rss_mib, max_rss_mib)
    yield Result(f"{name}: PSS", "MiB", found.pss_mib)
