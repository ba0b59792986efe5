"""Programs of the Machine Config Operator (MCO), which variables name."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable with the path of a program or a directory."""

    name: str
    meaning: str

    def read(self) -> Path:
        """Return the path; skip the test in one line when the variable does not name one."""
        text = os.environ.get(self.name, "")
        if not text:
            pytest.skip(f"{self.name} is not set: {self.meaning}")
        found = shutil.which(text) or text
        if not Path(found).exists():
            pytest.skip(f"{self.name}: cannot find {text}")
        return Path(found).absolute()


CONTROLLER = Variable("TREENAIL_TEST_MCC", "the program machine-config-controller")
DAEMON = Variable("TREENAIL_TEST_MCD", "the program machine-config-daemon")
KINDS = Variable("TREENAIL_TEST_MCO_CRDS", "a directory with the CRDs of openshift/api")


def read_count(name: str, default: int) -> int:
    """Return the number in a variable."""
    return int(os.environ.get(name) or default)


def split_seeds(first: int, count: int, size: int) -> list[range]:
    """Split the seeds into parts of ``size``: faulthandler ends a test after 15 minutes."""
    seeds = range(first, first + count)
    return [seeds[start : start + size] for start in range(0, count, size)]


def name_seeds(seeds: range) -> str:
    """Return the name of a test of these seeds."""
    return f"from-{seeds.start}"
