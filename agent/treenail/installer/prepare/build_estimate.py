"""Estimated seconds of an image build. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

LAYER_S = 2
"""Adding the config layer: it has a few files, and the registry has the base."""
RUN_S = 45
"""One RUN instruction, in most cases an installation of packages."""
_START_S = 10
_BYTES_PER_S = 40_000_000
"""Pull, unpack and push of a compressed base image."""
_USUAL_BASE = 1_200_000_000
_RUN = re.compile(r"^\s*(?:ONBUILD\s+)?RUN\s", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class BuildEstimate:
    """Expected seconds of a build, and the facts that they come from."""

    seconds: int
    why: str


def estimate_build(
    containerfiles: Sequence[str], *, base_size: int | None, measured_s: float | None
) -> BuildEstimate:
    """Estimate the build of these composed Containerfiles; without one, that of a layer.

    ``base_size`` are compressed bytes, None if unknown. ``measured_s`` is the last build of the
    same pool, which counts more than any estimate.
    """
    if measured_s is not None:
        return BuildEstimate(max(round(measured_s), 1), "as the last build")
    if not containerfiles:
        return BuildEstimate(LAYER_S, "one layer")
    count = sum(len(_RUN.findall(each)) for each in containerfiles)
    size = _USUAL_BASE if base_size is None else base_size
    seconds = _START_S + count * RUN_S + 2 * size // _BYTES_PER_S
    origin = "assumed" if base_size is None else "found"
    return BuildEstimate(
        int(seconds),
        f"{count} RUN instruction{'' if count == 1 else 's'}, a base of "
        f"{size / 1e9:.1f} GB ({origin})",
    )
