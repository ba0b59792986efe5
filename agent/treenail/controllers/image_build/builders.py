"""Builders of the two parts of an image, behind one Protocol each."""

from collections.abc import Sequence
from typing import Protocol

from treenail.api.machineosbuild import MachineOSBuild
from treenail.api.machineosconfig import MachineOSConfig
from treenail.controllers.image_build.facts import (
    Answer,
    AppendConfig,
    CheckImage,
    CheckPush,
    JobFacts,
    ResolveBase,
)
from treenail.controllers.image_build.planning import BuildPlan, SystemPlan


class SystemBuilder(Protocol):
    """Builds the system part of an image. All methods can be repeated, and raise `ClusterError`."""

    def start_attempt(
        self,
        plan: BuildPlan,
        system: SystemPlan,
        config: MachineOSConfig,
        build: MachineOSBuild,
        attempt: int,
    ) -> None:
        """Begin an attempt for one architecture.

        Raises `ConflictError` if one of the same key runs.
        """

    def adopt_attempt(self, job: JobFacts, build: MachineOSBuild) -> None:
        """Add a build to those that wait for a running attempt."""

    def end_attempt(self, job: JobFacts, *, has_inputs: bool) -> None:
        """End an attempt; with ``has_inputs`` delete also the inputs and logins of the build."""


class ConfigLayerBuilder(Protocol):
    """Adds the config to an image, through a registry alone."""

    def answer_question(
        self,
        question: CheckImage | CheckPush | AppendConfig,
        plan: BuildPlan,
        config: MachineOSConfig,
    ) -> Answer:
        """Do what a question requests within a time limit; an error becomes part of the answer."""

    def resolve_base(
        self, question: ResolveBase, architectures: Sequence[str], config: MachineOSConfig
    ) -> Answer:
        """Return the image of a tag by digest, within a time limit; errors as above.

        The image must have every architecture.
        """
