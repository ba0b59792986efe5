"""All changes of a machine whose crash states are tried."""

from pathlib import Path

from tests.crash.first_boot import FIRST_BOOTS, FirstBootRun
from tests.crash.scenarios import SCENARIOS
from tests.crash.states import CrashRun, ScenarioRun

NAMES = (*SCENARIOS, *FIRST_BOOTS)


def make_run(name: str, top: Path) -> CrashRun:
    """Make the run of this name, which writes below ``top``."""
    if name in FIRST_BOOTS:
        return FirstBootRun(FIRST_BOOTS[name], top)
    return ScenarioRun(SCENARIOS[name], top)
