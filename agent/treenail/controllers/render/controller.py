"""Render controller: writes the rendered MachineConfig of each pool and sets it in the pool.

`treenail.controllers.render.render` computes the config. This module writes in an order that may
stop after any write: first the rendered config, then the pool that names it, then the pool's
condition. It deletes unreferenced rendered configs last.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfig, machineconfigpool, object_meta
from treenail.config import validation
from treenail.config.generated import generate, sources
from treenail.controllers.pools import expected_writes, os_image, pool_status
from treenail.controllers.render.render import (
    RENDER_INPUTS,
    ControllerConfig,
    ObservedConfig,
    RenderedConfig,
    check_appliable,
    check_update,
    hash_render_inputs,
    render_pool,
)
from treenail.controllers.runtime import informer_set
from treenail.kube import api_client, event_recorder, resources, watch

log = logging.getLogger(__name__)

_VALIDATED_LIMIT = 5_000
KEPT_CONFIGS = 5
"""Number of unreferenced rendered configs that a pool retains, the newest ones."""
FIELD_IGNORED = "FieldIgnored"
_MAX_WARNINGS = 5
_PRUNE_S = 3600.0
_MAX_DELETIONS = 20
_OBSERVE_LIMIT_S = 60.0
"""How long a pool waits for the MachineConfigs of a changed KubeletConfig."""
_OBSERVE_RETRY_S = 1.0


class ValidatedConfigs:
    """Validates each object once. A watch replaces the object of a changed MachineConfig.

    Only valid ones are remembered, at most 5,000.
    """

    def __init__(self) -> None:
        self._results: dict[str, tuple[machineconfig.MachineConfig, validation.ValidConfig]] = {}

    def validate(self, config: machineconfig.MachineConfig) -> validation.ValidConfig:
        """Return and raise what `validate_config` does."""
        known = self._results.get(config.name)
        if known is not None and known[0] is config:
            return known[1]
        valid = validation.validate_config(config)
        if len(self._results) >= _VALIDATED_LIMIT:
            self._results.clear()
        self._results[config.name] = config, valid
        return valid


class RenderController:
    """A `treenail.controllers.runtime.workers.Controller` whose keys are pool names.

    It renders a pool after its MachineConfigs have not changed for ``settle_s``, so that several
    changes together need only one update of the nodes. The MCO waits 5 s too.
    """

    name = "render"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        events: event_recorder.EventRecorder,
        *,
        settle_s: float = 5.0,
        is_generating: bool = False,
    ) -> None:
        self._client = client
        self._clock = clock
        self._events = events
        self._settle_s = settle_s
        self._is_generating = is_generating
        self._sources: list[informer_set.InformerView[sources.SourceObject]] = []
        self._unobserved_since: dict[str, float] = {}
        self._pools: informer_set.InformerView[machineconfigpool.MachineConfigPool]
        self._configs: informer_set.InformerView[ObservedConfig]
        self._controller_configs: informer_set.InformerView[ControllerConfig]
        self._streams: informer_set.InformerView[os_image.OSImageStream]
        self._nodes: informer_set.InformerView[frozenset[str]]
        self._expected_pools = expected_writes.ExpectedPools()
        self._lock = threading.Lock()
        self._changed_at: dict[str, float] = {}
        self._reported_warnings: dict[str, tuple[str, ...]] = {}
        self._validated = ValidatedConfigs()

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch pools, MachineConfigs, the ControllerConfig, and references of Nodes."""
        pools = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGPOOLS),
            machineconfigpool.MachineConfigPool.from_json,
        )
        self._configs = informers.add_view(
            watch.WatchScope(resources.MACHINECONFIGS), ObservedConfig.from_json
        )
        self._controller_configs = informers.add_view(
            watch.WatchScope(resources.CONTROLLERCONFIGS), ControllerConfig.from_json
        )
        self._streams = informers.add_view(
            watch.WatchScope(resources.OSIMAGESTREAMS),
            os_image.OSImageStream.from_json,
            optional=True,
        )
        self._nodes = informers.add_view(watch.WatchScope(resources.NODES), _extract_references)
        self._pools = pools
        self._sources = [
            informers.add_view(
                watch.WatchScope(resource), sources.SourceObject.from_json, optional=True
            )
            for resource in (resources.KUBELETCONFIGS, resources.CONTAINERRUNTIMECONFIGS)
        ]

        def mark_changed(names: Iterable[str]) -> None:
            for name in names:
                with self._lock:
                    self._changed_at[name] = self._clock.monotonic()
                enqueue(name)

        def on_pool(
            name: str,
            before: machineconfigpool.MachineConfigPool | None,
            after: machineconfigpool.MachineConfigPool | None,
        ) -> None:
            if before is None or after is None or _extract_inputs(before) != _extract_inputs(after):
                enqueue(name)
            elif self._streams.get_all() and _is_updated(before) != _is_updated(after):
                enqueue(name)  # The status names the stream that all nodes run.
            if getattr(before, "os_image_stream", "") != getattr(after, "os_image_stream", ""):
                # Custom pools follow the stream of pool worker.
                mark_changed(pools.get_all())

        def on_config(
            _name: str, before: ObservedConfig | None, after: ObservedConfig | None
        ) -> None:
            mark_changed(
                _find_affected_pools(
                    pools.get_all(), [config for config in (before, after) if config]
                )
            )

        pools.add_handler(on_pool)
        self._configs.add_handler(on_config)
        self._controller_configs.add_handler(lambda *_: mark_changed(pools.get_all()))
        self._streams.add_handler(lambda *_: mark_changed(pools.get_all()))

    def sync_key(self, key: str) -> float | None:
        """Render the pool; raise `ClusterError` when the queue must retry."""
        cached = self._pools.find(key)
        if cached is None or cached.is_deleting:
            self._expected_pools.forget_pool(key)
            self._reported_warnings.pop(key, None)
            return None
        pool = self._expected_pools.get_latest(cached)
        if (early_s := self._get_remaining_settle_s(key)) > 0:
            return early_s
        unobserved, wait_s = self._find_unobserved(pool)
        if wait_s > 0:
            return wait_s
        observed, cluster = self._configs.get_all(), self._controller_configs.get_all()
        pools, stream = self._pools.get_all(), self._streams.find(os_image.STREAM_NAME)
        inputs = hash_render_inputs(
            pool,
            (config.config.metadata for config in observed.values()),
            (controller_config.metadata for controller_config in cluster.values()),
            os_image.describe_stream(pool, pools, stream),
        )
        try:
            settings = next(iter(cluster.values()), ControllerConfig())
            images = os_image.select_base_images(pool, pools, stream, settings.base_images)
            rendered = self._render_pool(pool, observed, replace(settings, base_images=images))
        except errors.ConfigError as error:
            self._write_condition(pool, _build_failure_condition(pool, error), inputs)
            return None
        rendered = replace(rendered, warnings=(*rendered.warnings, *unobserved))
        try:
            self._create_config(rendered)
            self._report_ignored_fields(pool, rendered)
            pool = self._update_pool(pool, rendered)
        except (errors.ForbiddenError, errors.InvalidError) as error:
            # A role or an admission webhook. The queue retries, and finds the same condition.
            message = f"Failed to write configuration for pool {pool.name}: {error}"
            condition = object_meta.Condition(
                pool_status.RENDER_DEGRADED, "True", "WriteRefused", message
            )
            self._write_condition(pool, condition, inputs)
            raise
        message = f"Rendered {rendered.name}"
        condition = object_meta.Condition(pool_status.RENDER_DEGRADED, "False", "Rendered", message)
        self._write_condition(
            pool, condition, inputs, _find_stream_in_effect(pool, rendered, stream)
        )
        self._prune_configs(pool, rendered.name)
        return _PRUNE_S

    def close(self) -> None:
        """Do nothing: the controller holds no resources."""

    def _get_remaining_settle_s(self, name: str) -> float:
        with self._lock:
            changed = self._changed_at.get(name)
        return 0.0 if changed is None else changed + self._settle_s - self._clock.monotonic()

    def _find_unobserved(
        self, pool: machineconfigpool.MachineConfigPool
    ) -> tuple[tuple[str, ...], float]:
        """Return a warning about an object whose MachineConfig is missing, and the time to wait.

        No pool is rendered from half of an edit. The wait ends when no controller comes.
        """
        objects = [source for view in self._sources for source in view.get_all().values()]
        source = generate.find_unobserved(pool, objects, is_generating=self._is_generating)
        if source is None:
            self._unobserved_since.pop(pool.name, None)
            return (), 0.0
        now = self._clock.monotonic()
        # A new edit does not restart the wait: edits that never end must not block the pool.
        if pool.name not in self._unobserved_since:
            self._unobserved_since[pool.name] = now
            log.info("pool %s waits for the MachineConfig of %s", pool.name, source.title)
        since = self._unobserved_since[pool.name]
        text = (
            f"{source.title}: no MachineConfig contains its generation {source.metadata.generation}"
            " yet; see its conditions, and enable the controller generate"
        )
        return (text,), min(since + _OBSERVE_LIMIT_S - now, _OBSERVE_RETRY_S)

    def _render_pool(
        self,
        pool: machineconfigpool.MachineConfigPool,
        observed: Mapping[str, ObservedConfig],
        cluster: ControllerConfig,
    ) -> RenderedConfig:
        configs = [config.config for config in observed.values() if not config.is_rendered]
        name = pool.configuration.name
        rendered = render_pool(
            pool,
            configs,
            cluster,
            validate=self._validated.validate,
            read_current=lambda: self._read_config(name) if name else None,
        )
        if name != rendered.name:
            check_appliable(rendered, configs)
        # Read the current config only for a comparison: it can be large.
        if name and name != rendered.name and (current := self._read_config(name)):
            check_update(current, rendered)
        existing = observed.get(rendered.name)
        if existing is not None and not existing.has_matching_hash:
            raise errors.ConfigError(
                f"cannot use MachineConfig {rendered.name}: its contents do not match the hash in "
                "its name, so a user edited it",
                remedy=f"delete it to render it again: kubectl delete mc {rendered.name}",
            )
        return rendered

    def _read_config(self, name: str) -> machineconfig.MachineConfig | None:
        """Read the config; None when a user deleted it."""
        document = self._client.find(resources.MACHINECONFIGS, name)
        return None if document is None else machineconfig.MachineConfig.from_json(document)

    def _create_config(self, rendered: RenderedConfig) -> None:
        if self._configs.find(rendered.name) is not None:
            return
        try:
            self._client.create(resources.MACHINECONFIGS, rendered.config.to_json())
        except errors.AlreadyExistsError:
            log.debug("%s exists already", rendered.name)
        else:
            log.info("rendered %s from %s", rendered.name, ", ".join(rendered.sources))

    def _report_ignored_fields(
        self, pool: machineconfigpool.MachineConfigPool, rendered: RenderedConfig
    ) -> None:
        """Log fields without effect and record an Event, once until they change."""
        if self._reported_warnings.get(pool.name, ()) == rendered.warnings:
            return
        self._reported_warnings[pool.name] = rendered.warnings
        if not rendered.warnings:
            return
        for warning in rendered.warnings:
            log.warning("%s", warning)
        regarding = event_recorder.ObjectReference(
            machineconfigpool.KIND,
            pool.name,
            uid=pool.metadata.uid,
            api_version=machineconfigpool.API_VERSION,
        )
        shown = rendered.warnings[:_MAX_WARNINGS]
        more = len(rendered.warnings) - len(shown)
        text = "; ".join(shown) + (f"; and {more} more" if more else "")
        self._events.record_warning(regarding, FIELD_IGNORED, text)

    def _update_pool(
        self, pool: machineconfigpool.MachineConfigPool, rendered: RenderedConfig
    ) -> machineconfigpool.MachineConfigPool:
        if pool.configuration.name == rendered.name and (
            pool.configuration.source == rendered.sources
        ):
            return pool
        body: decode.Json = {
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "spec": {"configuration": rendered.to_pool_configuration()},
        }
        document = self._client.patch(resources.MACHINECONFIGPOOLS, pool.name, body)
        regarding = event_recorder.ObjectReference(
            machineconfigpool.KIND,
            pool.name,
            uid=pool.metadata.uid,
            api_version=machineconfigpool.API_VERSION,
        )
        text = f"{rendered.name} from {', '.join(rendered.sources)}"
        self._events.record_normal(regarding, "RenderedConfigGenerated", text)
        return self._expected_pools.record_write(
            pool, machineconfigpool.MachineConfigPool.from_json(document)
        )

    def _write_condition(
        self,
        pool: machineconfigpool.MachineConfigPool,
        condition: object_meta.Condition,
        inputs: str,
        stream: str = "",
    ) -> None:
        """Write the condition RenderDegraded, the hash of the inputs and the stream if one differs.

        All in one write: a client that reads the hash also reads the result. ``stream`` is the OS
        image stream that all nodes run.
        """
        known = _find_condition(pool)
        is_known = known is not None and replace(known, last_transition_time="") == condition
        is_known = is_known and pool.status_os_image_stream == stream
        if is_known and pool.status.get(RENDER_INPUTS) == inputs:
            return
        conditions = object_meta.merge_conditions(
            pool.conditions, [condition], now=clocks.format_rfc3339(self._clock.now())
        )
        body: decode.Json = {
            # A merge patch replaces the whole list, so it must fail if another writer changed it.
            "metadata": {"resourceVersion": pool.metadata.resource_version},
            "status": {
                RENDER_INPUTS: inputs,
                "osImageStream": {"name": stream} if stream else None,
                "conditions": [entry.to_json() for entry in conditions],
            },
        }
        document = self._client.patch(
            resources.MACHINECONFIGPOOLS, pool.name, body, subresource="status"
        )
        self._expected_pools.record_write(
            pool, machineconfigpool.MachineConfigPool.from_json(document)
        )
        if condition.status == "True" and not is_known:
            log.warning("%s", condition.message)
            regarding = event_recorder.ObjectReference(
                machineconfigpool.KIND,
                pool.name,
                uid=pool.metadata.uid,
                api_version=machineconfigpool.API_VERSION,
            )
            self._events.record_warning(regarding, condition.reason, condition.message)

    def _prune_configs(self, pool: machineconfigpool.MachineConfigPool, current: str) -> None:
        """Delete unreferenced rendered configs of the pool, except the newest."""
        used = {current, *_list_pool_references(self._pools.get_all().values())}
        used.update(*self._nodes.get_all().values())
        unused = sorted(
            (
                config
                for config in self._configs.get_all().values()
                if config.is_rendered
                and config.pool_uid == pool.metadata.uid
                and config.config.name not in used
            ),
            key=lambda config: config.sort_key,
        )
        for config in unused[: max(len(unused) - KEPT_CONFIGS, 0)][:_MAX_DELETIONS]:
            name = config.config.name
            try:
                # With the UID, so that one that was created again under this name stays.
                self._client.delete(resources.MACHINECONFIGS, name, uid=config.config.metadata.uid)
            except errors.NotFoundError:
                continue
            log.info("deleted unreferenced %s", name)


def _find_condition(pool: machineconfigpool.MachineConfigPool) -> object_meta.Condition | None:
    return next(
        (
            condition
            for condition in pool.conditions
            if condition.type == pool_status.RENDER_DEGRADED
        ),
        None,
    )


def _extract_inputs(pool: machineconfigpool.MachineConfigPool) -> object:
    """Return the parts of a pool that rendering reads or restores."""
    return (
        pool.machine_config_selector,
        pool.configuration,
        pool.os_image_stream,
        pool.status_os_image_stream,
        _find_condition(pool),
    )


def _is_updated(pool: machineconfigpool.MachineConfigPool) -> bool:
    states = {(condition.type, condition.status) for condition in pool.conditions}
    return (pool_status.UPDATED, "True") in states and (pool_status.DEGRADED, "True") not in states


def _find_stream_in_effect(
    pool: machineconfigpool.MachineConfigPool,
    rendered: RenderedConfig,
    stream: os_image.OSImageStream | None,
) -> str:
    """Return the stream of the image that all nodes run, as the MCO; empty without one."""
    if stream is None or rendered.has_os_image_override or not _is_updated(pool):
        return ""
    has_config = pool.status_configuration.name == rendered.name
    return stream.find_by_image(rendered.config.os_image_url) if has_config else ""


def _find_affected_pools(
    pools: Mapping[str, machineconfigpool.MachineConfigPool], configs: Iterable[ObservedConfig]
) -> set[str]:
    """Return the pools that select or own one of the configs."""
    return {
        name
        for name, pool in pools.items()
        for config in configs
        if (
            config.pool_uid == pool.metadata.uid
            if config.is_rendered
            else pool.selects(config.config.metadata.labels)
        )
    }


def _extract_references(document: decode.Json) -> frozenset[str]:
    """Return the rendered configs that a Node references."""
    annotations = (
        decode.Fields.from_json(document, "Node").get_object("metadata").get_text_map("annotations")
    )
    return frozenset(
        annotations[name]
        for name in (key.CURRENT_CONFIG, key.DESIRED_CONFIG)
        if annotations.get(name)
    )


def _list_pool_references(pools: Iterable[machineconfigpool.MachineConfigPool]) -> set[str]:
    return {
        name for pool in pools for name in (pool.configuration.name, pool.status_configuration.name)
    }


def _build_failure_condition(
    pool: machineconfigpool.MachineConfigPool, error: errors.ConfigError
) -> object_meta.Condition:
    reason = "Unreconcilable" if isinstance(error, errors.UnreconcilableError) else "RenderFailed"
    remedy = f"; {error.remedy}" if error.remedy else ""
    message = f"Failed to render configuration for pool {pool.name}: {error}{remedy}"
    return object_meta.Condition(pool_status.RENDER_DEGRADED, "True", reason, message)
