"""How far ``podman pull`` is, by what it writes where there is no terminal.

A line ``Copying blob sha256:…`` for each layer as it begins, of which several are fetched at once;
since 2026 also ``Progress: 1.5GiB / 2.0GiB`` twice a second, of the layers that have begun
(containers/image, copy/progress_bars.go and copy/progress_nontty.go). How large layers are is the
manifest's to say.
"""

import re
from collections.abc import Iterable, Mapping

from treenail.host.ostree.deployments import TransactionProgress

# What is fetched at once, unless containers.conf(5) says otherwise, may be unfinished.
_PARALLEL_LAYERS = 6
# Fetching is not all there is to it: 100 is for success alone.
_MAX_UNFINISHED_PERCENT = 99
_BEGUN = re.compile(r"^Copying blob (sha256:[0-9a-f]{64})", re.MULTILINE)
_READ = re.compile(r"^Progress: (\d+(?:\.\d+)?)([KMGT]?i?[Bb]) / ", re.MULTILINE)
_FETCHED = re.compile(r"^(?:Copying config|Writing manifest)", re.MULTILINE)
_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class PodmanProgress:
    """``layers`` are the sizes in bytes of the image's layers by digest; empty if not known."""

    def __init__(self, layers: Mapping[str, int]) -> None:
        self._layers = layers
        self._total = sum(layers.values())
        self.last_progress = TransactionProgress("pulling the image", None)

    def parse_output(self, output: str) -> TransactionProgress:
        """Take in all that podman has written so far."""
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
