"""Makes a build controller with its collaborators."""

from dataclasses import dataclass

from treenail.builder.images.signatures import SigningKey
from treenail.clock import Clock
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.controller import (
    BuildController,
    BuildParts,
    FindHold,
    never_hold,
)
from treenail.controllers.image_build.events import BuildEvents
from treenail.controllers.image_build.job import JobSettings
from treenail.controllers.image_build.job_builder import JobBuilder
from treenail.controllers.image_build.layer_builder import LayerBuilder
from treenail.controllers.image_build.planner import Planner
from treenail.controllers.image_build.pruner import ImagePruner
from treenail.controllers.image_build.references import ReferenceReader
from treenail.controllers.image_build.repository_gate import RepositoryGate
from treenail.controllers.runtime.metrics import ControllerMetrics
from treenail.image.inputs.build_inputs import list_builder_options
from treenail.kube.client import Client
from treenail.kube.events import EventRecorder
from treenail.kube.fence import LateWrites
from treenail.registry.proxies import ProxySettings
from treenail.registry.transport import RegistryLimits


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Settings that an installation may choose."""

    proxies: ProxySettings | None = None
    signing_key: SigningKey | None = None
    limits: RegistryLimits | None = None
    """Of requests that add the config to an image."""
    find_hold: FindHold = never_hold
    late_writes: LateWrites | None = None
    """None for a process that always leads."""


def make_build_controller(
    client: Client,
    clock: Clock,
    recorder: EventRecorder,
    metrics: ControllerMetrics,
    settings: JobSettings,
    options: BuildOptions | None = None,
) -> BuildController:
    """Make the controller; its Jobs are in the namespace of the settings."""
    chosen = options or BuildOptions()
    reader = ClusterReader(client, clock, namespace=settings.namespace)
    planner = Planner(
        reader, options=list_builder_options(has_cache=bool(settings.cache_repository))
    )
    gate, events = RepositoryGate(), BuildEvents(recorder)
    parts = BuildParts(
        planner,
        JobBuilder(client, planner, settings, chosen.late_writes),
        LayerBuilder(
            planner,
            clock,
            proxies=chosen.proxies,
            signing_key=chosen.signing_key,
            limits=chosen.limits,
            gate=gate,
        ),
        events,
        ImagePruner(
            planner, ReferenceReader(client, reader), events, clock, gate, proxies=chosen.proxies
        ),
        chosen.find_hold,
    )
    return BuildController(client, clock, parts, namespace=settings.namespace, metrics=metrics)
