"""All readers of input from outside that are fuzzed."""

from importlib import import_module

from tests.fuzz.target import FuzzTarget

MODULES = ("configs", "hosts", "objects", "registries", "servers", "states")


def load_targets(module: str) -> tuple[FuzzTarget, ...]:
    """Return the targets of one module of this package."""
    found: tuple[FuzzTarget, ...] = import_module(f"{__name__}.{module}").TARGETS
    return found


def load_all_targets() -> dict[str, tuple[str, FuzzTarget]]:
    """Return every target with its module, by name."""
    return {each.name: (module, each) for module in MODULES for each in load_targets(module)}
