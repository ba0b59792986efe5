"""Progress of ``podman pull``, parsed from its output without a terminal.

podman prints ``Copying blob sha256:…`` when it begins a layer, and pulls several layers at once.
Since 2026 it also prints ``Progress: 1.5GiB / 2.0GiB`` twice a second, for the layers that have
begun (containers/image, copy/progress_bars.go and copy/progress_nontty.go). Sizes of layers come
from the manifest.
"""

import re
from collections.abc import Iterable, Mapping

from treenail.host.ostree.deployments import TransactionProgress

# The default of image_parallel_copies in containers.conf(5): so many layers may be unfinished.
_PARALLEL_LAYERS = 6
# podman writes the image after the last layer: only success is 100 %.
_MAX_UNFINISHED_PERCENT = 99
_BEGUN = re.compile(r"^Copying blob (sha256:[0-9a-f]{64})", re.MULTILINE)
_READ = re.compile(r"^Progress: (\d+(?:\.\d+)?)([KMGT]?i?[Bb]) / ", re.MULTILINE)
_FETCHED = re.compile(r"^(?:Copying config|Writing manifest)", re.MULTILINE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class PodmanProgress:
    """Progress of one pull. ``layers`` maps digests to sizes in bytes; empty if unknown."""

    def __init__(self, layers: Mapping[str, int]) -> None:
        self._layers = layers
        self._total = sum(layers.values())
        self.last_progress = TransactionProgress("pulling the image", None)

    def parse_output(self, output: str) -> TransactionProgress:
        """Parse the whole output so far, and return the progress."""
        begun = list(dict.fromkeys(_BEGUN.findall(output)))
        known = [each for each in begun if each in self._layers]
        percent = None
        if self._total:
            done = max(self._sum_sizes(known[:-_PARALLEL_LAYERS]), _parse_bytes_read(output))
            done = self._total if _FETCHED.search(output) else done
            percent = max(
                self.last_progress.percent or 0,
                min(done * 100 // self._total, _MAX_UNFINISHED_PERCENT),
            )
        text = self.last_progress.text
        if begun:
            of = f" of {len(self._layers)}" if self._layers else ""
            text = f"pulling layer {len(begun)}{of}"
        self.last_progress = TransactionProgress(text, percent)
        return self.last_progress

    def _sum_sizes(self, digests: Iterable[str]) -> int:
        return sum(self._layers[each] for each in digests)


def _parse_bytes_read(output: str) -> int:
    found = _READ.findall(output)
    if not found:
        return 0
    number, unit = found[-1]
    return int(float(number) * _UNITS.get(unit.lower(), 0))
