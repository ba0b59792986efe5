"""The render controller: keeps each pool's rendered MachineConfig, and points the pool at it.

What to render is `treenail.controllers.render.render`'s. Here it is written, once, in an order that
may break off anywhere: the rendered config first, then the pool that names it, then what is said of
it; what nothing refers to any more goes last.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from treenail.api import annotations as key
from treenail.api.decode import Fields, Json
from treenail.api.machineconfig import MachineConfig
from treenail.api.machineconfigpool import API_VERSION, KIND, MachineConfigPool
from treenail.api.meta import Condition, renewed
from treenail.clock import Clock, rfc3339
from treenail.config.identity import rendered_name
from treenail.controllers.render.render import ControllerConfig, Rendered, is_rendered, render
from treenail.controllers.rollout.expected import ExpectedPools
from treenail.controllers.runtime.informers import Informers, View
from treenail.errors import AlreadyExists, ConfigError, NotFound, UnreconcilableError
from treenail.kube.client import Client
from treenail.kube.events import Recorder, Regarding
from treenail.kube.resources import (
    CONTROLLERCONFIGS,
    MACHINECONFIGPOOLS,
    MACHINECONFIGS,
    NODES,
)
from treenail.kube.watch import Scope

log = logging.getLogger(__name__)

DEGRADED = "RenderDegraded"
KEPT = 5
"""Rendered configs of a pool that stay though nothing refers to them, the newest."""
_PRUNE_S = 3600.0
_DELETED_AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class Seen:
    """A MachineConfig as the watch shows it; of a rendered one, everything but the contents."""

    config: MachineConfig
    rendered: bool = False
    genuine: bool = True
    """A rendered config whose contents are those that its name is the hash of."""

    @classmethod
    def from_json(cls, document: Json) -> "Seen":
        """Raises `ConfigError`."""
        config = MachineConfig.from_json(document)
        if not is_rendered(config):
            return cls(config)
        owner = next(each.name for each in config.metadata.owner_references if each.controller)
        spec = document.get("spec")
        genuine = isinstance(spec, dict) and rendered_name(owner, spec) == config.name
        return cls(MachineConfig(metadata=config.metadata), rendered=True, genuine=genuine)

    @property
    def owner(self) -> str:
        """The uid of the pool that a rendered config belongs to."""
        owners = self.config.metadata.owner_references
        return next((each.uid for each in owners if each.controller), "")

    @property
    def age(self) -> tuple[str, int, str]:
        """Sorts the oldest first; within a second by version, which only ever grows."""
        meta = self.config.metadata
        version = int(meta.resource_version) if meta.resource_version.isdigit() else 0
        return str(meta.others.get("creationTimestamp", "")), version, meta.name


class Rendering:
    """A `treenail.controllers.runtime.workers.Controller`, whose keys are the names of pools.

    A pool is rendered when its MachineConfigs have not changed for ``settle_s``, so that several
    changes made together cost its nodes one update.
    """

    name = "render"

    def __init__(
        self, client: Client, clock: Clock, events: Recorder, *, settle_s: float = 5.0
    ) -> None:
        self._client = client
        self._clock = clock
        self._events = events
        self._settle_s = settle_s
        self._pools: View[MachineConfigPool]
        self._configs: View[Seen]
        self._cluster: View[ControllerConfig]
        self._nodes: View[frozenset[str]]
        self._written = ExpectedPools()
        self._lock = threading.Lock()
        self._changed: dict[str, float] = {}

    def watch(self, informers: Informers, look_at: Callable[[str], None]) -> None:
        """Watch pools, MachineConfigs, the ControllerConfig, and what nodes refer to."""
        pools = informers.view(Scope(MACHINECONFIGPOOLS), MachineConfigPool.from_json)
        self._configs = informers.view(Scope(MACHINECONFIGS), Seen.from_json)
        self._cluster = informers.view(Scope(CONTROLLERCONFIGS), ControllerConfig.from_json)
        self._nodes = informers.view(Scope(NODES), _referred_to)
        self._pools = pools

        def changed(names: Iterable[str]) -> None:
            for name in names:
                with self._lock:
                    self._changed[name] = self._clock.monotonic()
                look_at(name)

        def on_pool(
            name: str, before: MachineConfigPool | None, after: MachineConfigPool | None
        ) -> None:
            if before is None or after is None or _asked(before) != _asked(after):
                look_at(name)

        def on_config(_name: str, before: Seen | None, after: Seen | None) -> None:
            changed(_concerned(pools.all(), [each for each in (before, after) if each]))

        pools.tell(on_pool)
        self._configs.tell(on_config)
        self._cluster.tell(lambda *_: changed(pools.all()))

    def sync(self, key: str) -> float | None:
        """Render the pool; raises `ClusterError` when it is to be tried again."""
        cached = self._pools.find(key)
        if cached is None or cached.deleting:
            self._written.forget(key)
            return None
        pool = self._written.latest(cached)
        if (early_s := self._early_s(key)) > 0:
            return early_s
        try:
            rendered = self._rendered(pool)
        except ConfigError as error:
            self._say(pool, _failed(pool, error))
            return None
        self._create(rendered)
        pool = self._point(pool, rendered)
        message = f"Rendered {rendered.name}"
        self._say(pool, Condition(DEGRADED, "False", "Rendered", message))
        self._prune(pool, rendered.name)
        return _PRUNE_S

    def close(self) -> None:
        """Nothing is held."""

    def _early_s(self, name: str) -> float:
        with self._lock:
            changed = self._changed.get(name)
        return 0.0 if changed is None else changed + self._settle_s - self._clock.monotonic()

    def _rendered(self, pool: MachineConfigPool) -> Rendered:
        seen = self._configs.all()
        configs = [each.config for each in seen.values() if not each.rendered]
        cluster = next(iter(self._cluster.all().values()), ControllerConfig())
        rendered = render(pool, configs, cluster)
        current = pool.configuration.name
        if current and current != rendered.name:
            # What nodes have is read only when there is something to compare it with.
            rendered = render(pool, configs, cluster, current=self._config(current))
        found = seen.get(rendered.name)
        if found is not None and not found.genuine:
            raise ConfigError(
                f"MachineConfig {rendered.name} does not hold what its name is the hash of: "
                "somebody edited it",
                remedy=f"delete it, and it is rendered anew: kubectl delete mc {rendered.name}",
            )
        return rendered

    def _config(self, name: str) -> MachineConfig | None:
        """None for one that was deleted by hand: there is nothing left to compare with."""
        try:
            return MachineConfig.from_json(self._client.get(MACHINECONFIGS, name))
        except NotFound:
            return None

    def _create(self, rendered: Rendered) -> None:
        if self._configs.find(rendered.name) is not None:
            return
        try:
            self._client.create(MACHINECONFIGS, rendered.config.to_json())
        except AlreadyExists:
            log.debug("%s is there already", rendered.name)
        else:
            log.info("rendered %s from %s", rendered.name, ", ".join(rendered.sources))

    def _point(self, pool: MachineConfigPool, rendered: Rendered) -> MachineConfigPool:
        if pool.configuration.name == rendered.name and (
            pool.configuration.source == rendered.sources
        ):
            return pool
        body: Json = {
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "spec": {"configuration": rendered.reference()},
        }
        found = self._client.patch(MACHINECONFIGPOOLS, pool.name, body)
        regarding = Regarding(KIND, pool.name, uid=pool.metadata.uid, api_version=API_VERSION)
        text = f"{rendered.name} from {', '.join(rendered.sources)}"
        self._events.normal(regarding, "RenderedConfigGenerated", text)
        return self._written.wrote(pool, MachineConfigPool.from_json(found))

    def _say(self, pool: MachineConfigPool, condition: Condition) -> None:
        """Write the pool's RenderDegraded, if it says something else, and no other condition."""
        known = next((each for each in pool.conditions if each.type == DEGRADED), None)
        if known is not None and replace(known, last_transition_time="") == condition:
            return
        conditions = renewed(pool.conditions, [condition], now=rfc3339(self._clock.now()))
        body: Json = {
            # The list is replaced as a whole: only as it was read may it be written.
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": {"conditions": [each.to_json() for each in conditions]},
        }
        found = self._client.patch(MACHINECONFIGPOOLS, pool.name, body, subresource="status")
        self._written.wrote(pool, MachineConfigPool.from_json(found))
        if condition.status == "True":
            log.warning("%s", condition.message)
            regarding = Regarding(KIND, pool.name, uid=pool.metadata.uid, api_version=API_VERSION)
            self._events.warning(regarding, condition.reason, condition.message)

    def _prune(self, pool: MachineConfigPool, current: str) -> None:
        """Delete rendered configs of the pool that nothing refers to, but for the newest."""
        used = {current, *_named_by(self._pools.all().values())}
        used.update(*self._nodes.all().values())
        unused = sorted(
            (
                seen
                for seen in self._configs.all().values()
                if seen.rendered
                and seen.owner == pool.metadata.uid
                and seen.config.name not in used
            ),
            key=lambda seen: seen.age,
        )
        for seen in unused[: max(len(unused) - KEPT, 0)][:_DELETED_AT_ONCE]:
            name = seen.config.name
            try:
                self._client.delete(MACHINECONFIGS, name, uid=seen.config.metadata.uid)
            except NotFound:
                continue
            log.info("deleted %s, which nothing refers to", name)


def _asked(pool: MachineConfigPool) -> object:
    """What of a pool the rendering depends on, or has to restore."""
    said = next((each for each in pool.conditions if each.type == DEGRADED), None)
    return pool.machine_config_selector, pool.configuration, pool.os_image_stream, said


def _concerned(pools: Mapping[str, MachineConfigPool], seen: Iterable[Seen]) -> set[str]:
    """The pools that select one of the configs, or own it."""
    return {
        name
        for name, pool in pools.items()
        for each in seen
        if (
            each.owner == pool.metadata.uid
            if each.rendered
            else pool.machine_config_selector is not None
            and pool.machine_config_selector.matches(each.config.metadata.labels)
        )
    }


def _referred_to(document: Json) -> frozenset[str]:
    """The rendered configs that a Node names."""
    notes = Fields.of(document, "Node").nested("metadata").text_map("annotations")
    return frozenset(
        notes[name] for name in (key.CURRENT_CONFIG, key.DESIRED_CONFIG) if notes.get(name)
    )


def _named_by(pools: Iterable[MachineConfigPool]) -> set[str]:
    return {name for pool in pools for name in (pool.configuration.name, pool.reported.name)}


def _failed(pool: MachineConfigPool, error: ConfigError) -> Condition:
    reason = "Unreconcilable" if isinstance(error, UnreconcilableError) else "RenderFailed"
    remedy = f"; {error.remedy}" if error.remedy else ""
    message = f"Failed to render configuration for pool {pool.name}: {error}{remedy}"
    return Condition(DEGRADED, "True", reason, message)
