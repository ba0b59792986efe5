"""The fixtures of registries for every test of this directory."""

from tests.registry.real_registry import any_registry, lab_registry, real_registry

__all__ = ["any_registry", "lab_registry", "real_registry"]
