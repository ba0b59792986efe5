"""Registries for the tests of the build controller."""

from tests.registry.real_registry import lab_registry

__all__ = ["lab_registry"]
