"""What the modules of a running agent cost before it has done anything.

Beside them the bare interpreter, and the official client that the agent does without.
"""

from collections.abc import Iterator

from bench.interpreter import Cost, cost
from bench.result import Result

STATUS = "import treenail.cli.main, treenail.cli.node.status"
AGENT = "import treenail.cli.main, treenail.cli.node.run"
OFFICIAL = "import kubernetes.client; kubernetes.client.CoreV1Api"


def measure(_seconds: float) -> Iterator[Result]:
    yield from _results("bare interpreter", cost("pass"))
    yield from _results("modules of treenail status", cost(STATUS))
    yield from _results("modules of the agent", cost(AGENT), rss_at_most=40.0)
    yield from _results("official client alone", cost(OFFICIAL))


def _results(name: str, found: Cost, *, rss_at_most: float | None = None) -> Iterator[Result]:
    yield Result(f"{name}: import", "ms", found.taken_s * 1000)
    yield Result(f"{name}: RSS", "MiB", found.rss_mib, rss_at_most)
    yield Result(f"{name}: PSS", "MiB", found.pss_mib)
