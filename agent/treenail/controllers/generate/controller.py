"""Controller ``generate``: writes the MachineConfigs that other objects of the cluster describe.

`treenail.config.generated.generate` computes them. This module writes in an order that may stop
after any write: the annotation that decides the names, the MachineConfigs, deletions, finalizers
of the Machine Config Operator (MCO), and last the conditions, for which the render controller
waits. It writes nothing while the MCO runs its own controllers.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import (
    component_names,
    decode,
    kinds,
    machineconfig,
    machineconfigpool,
    machineosconfig,
)
from treenail.config.generated import generate, sources
from treenail.controllers.render import render
from treenail.controllers.runtime import informer_set
from treenail.kube import api_client, event_recorder, resources, watch

log = logging.getLogger(__name__)

KEY = "cluster"
_REFRESH_S = 600.0
"""Interval of reading what is not watched: the kubelet's configuration of kubeadm."""
_MCO_RETRY_S = 30.0
_MAX_MESSAGE = 2_000
_RESOURCES = {resource.kind: resource for resource in resources.GENERATOR_SOURCES}


class GenerateController:
    """A `treenail.controllers.runtime.workers.Controller` with one key, the whole cluster."""

    name = "generate"

    def __init__(
        self,
        client: api_client.Client,
        clock: clocks.Clock,
        events: event_recorder.EventRecorder,
        *,
        settle_s: float = 0.5,
    ) -> None:
        self._client = client
        self._clock = clock
        self._events = events
        self._settle_s = settle_s
        self._lock = threading.Lock()
        self._changed_at = float("-inf")
        self._is_mco_reported = False
        self._reported: dict[tuple[str, str, str], str] = {}
        self._sources: dict[str, informer_set.InformerView[sources.SourceObject]]
        self._pools: informer_set.InformerView[machineconfigpool.MachineConfigPool]
        self._configs: informer_set.InformerView[render.ObservedConfig]
        self._controller_configs: informer_set.InformerView[render.ControllerConfig]
        self._image_configs: informer_set.InformerView[machineosconfig.MachineOSConfig]

    def register_watches(
        self, informers: informer_set.InformerSet, enqueue: Callable[[str], None]
    ) -> None:
        """Watch the source objects, of which a cluster may lack kinds, and what they depend on."""

        def handle_change(_name: str, before: object, after: object) -> None:
            if not _is_ignored_change(before, after):
                with self._lock:
                    self._changed_at = self._clock.monotonic()
                enqueue(KEY)

        scope, add_view = watch.WatchScope, informers.add_view
        self._pools = add_view(
            scope(resources.MACHINECONFIGPOOLS), machineconfigpool.MachineConfigPool.from_json
        )
        self._configs = add_view(scope(resources.MACHINECONFIGS), render.ObservedConfig.from_json)
        self._controller_configs = add_view(
            scope(resources.CONTROLLERCONFIGS), render.ControllerConfig.from_json
        )
        self._image_configs = add_view(
            scope(resources.MACHINEOSCONFIGS),
            machineosconfig.MachineOSConfig.from_json,
            optional=True,
        )
        self._sources = {
            kind: add_view(scope(resource), sources.SourceObject.from_json, optional=True)
            for kind, resource in _RESOURCES.items()
        }
        for source_view in self._sources.values():
            source_view.add_handler(handle_change)
        self._pools.add_handler(handle_change)
        self._configs.add_handler(handle_change)
        self._controller_configs.add_handler(handle_change)
        self._image_configs.add_handler(handle_change)

    def sync_key(self, key: str) -> float | None:  # noqa: ARG002  # there is one
        """Write what the objects require; raise `ClusterError` when the queue must retry."""
        with self._lock:
            early_s = self._changed_at + self._settle_s - self._clock.monotonic()
        if early_s > 0:
            return early_s
        objects = {
            source.key: source
            for view in self._sources.values()
            for source in view.get_all().values()
        }
        observed = self._configs.get_all()
        configs = [entry.config for entry in observed.values()]
        origins = {generate.find_generator(config) for config in configs}
        if not objects and origins <= {"", machineconfigpool.KIND}:
            return None
        if self._is_mco_running():
            return _MCO_RETRY_S
        generation = generate.generate_configs(
            objects,
            self._pools.get_all().values(),
            configs,
            self._read_facts(configs),
            [kind for kind, view in self._sources.items() if view.listed_at is None],
        )
        results = generation.results
        written = {name: self._write_suffix(result) for name, result in results.items()}
        failures = self._write_configs(generation)
        for name in generation.obsolete:
            self._delete_config(observed[name].config)
        for source in objects.values():
            if source.metadata.is_deleting:
                self._remove_finalizers(source)
        for title, result in results.items():
            self._write_status(written[title], result)
        self._reported = {name: text for name, text in self._reported.items() if name in results}
        if failures:
            raise failures[0]
        return _REFRESH_S

    def close(self) -> None:
        """Do nothing: the controller holds no resources."""

    def _is_mco_running(self) -> bool:
        deployment = self._client.find(
            resources.DEPLOYMENTS,
            component_names.MCO_CONTROLLER,
            namespace=component_names.MCO_NAMESPACE,
        )
        fields = decode.Fields.from_json(deployment or {}, "Deployment")
        is_running = any(
            fields.get_object(part).get_optional_integer("replicas") for part in ("spec", "status")
        )
        if is_running and not self._is_mco_reported:
            log.warning(
                "generating no MachineConfigs: the Machine Config Operator runs its controllers; "
                "scale the Deployment %s in %s to 0 first",
                component_names.MCO_CONTROLLER,
                component_names.MCO_NAMESPACE,
            )
        self._is_mco_reported = is_running
        return is_running

    def _read_facts(self, configs: Iterable[machineconfig.MachineConfig]) -> sources.ClusterFacts:
        kubeadm = self._client.find(
            resources.CONFIGMAPS, sources.KUBEADM_CONFIG, namespace="kube-system"
        )
        inputs = render.InputManifests(
            pools=dict(self._pools.get_all()),
            configs={config.name: config for config in configs},
            controller_configs=dict(self._controller_configs.get_all()),
            image_configs=dict(self._image_configs.get_all()),
            kubeadm=kubeadm or {},
        )
        return inputs.collect_facts()

    def _write_suffix(self, result: sources.ObjectResult) -> sources.SourceObject:
        known = result.source.metadata.annotations.get(key.CONFIG_NAME_SUFFIX)
        if result.suffix in (None, known):
            return result.source
        annotations = {key.CONFIG_NAME_SUFFIX: result.suffix}
        return self._patch(result.source, {"metadata": {"annotations": annotations}})

    def _write_configs(self, generation: generate.Generation) -> list[errors.ClusterError]:
        """Return the errors of a role or an admission webhook; their objects name them."""
        failures: list[errors.ClusterError] = []
        for name, config in generation.configs.items():
            present = self._configs.find(name)
            if present is not None and present.config == config:
                continue
            try:
                document = config.to_json()
                if present is None:
                    self._client.create(resources.MACHINECONFIGS, document)
                else:
                    if replace(present.config, metadata=config.metadata) == config:
                        # Another form of the spec's empty fields would be another generation.
                        stored = self._client.get(resources.MACHINECONFIGS, name)
                        document = {**stored, "metadata": document["metadata"]}
                    self._client.update(resources.MACHINECONFIGS, name, document)
            except (errors.ForbiddenError, errors.InvalidError) as error:
                failures.append(error)
                problem = errors.ConfigError(f"cannot write {name}: {error}", remedy=error.remedy)
                for result in generation.results.values():
                    if name in result.config_names:
                        result.problems.append(problem)
            else:
                origin = config.metadata.annotations.get(key.GENERATED_FROM, "")
                log.info("generated %s from %.300s", name, origin)
        return failures

    def _delete_config(self, config: machineconfig.MachineConfig) -> None:
        try:
            self._client.delete(resources.MACHINECONFIGS, config.name, uid=config.metadata.uid)
        except errors.NotFoundError:
            return
        log.info("deleted %s: no object requires it", config.name)

    def _remove_finalizers(self, source: sources.SourceObject) -> None:
        """Remove the finalizers of the MCO: names of MachineConfigs, which are deleted now.

        One that the watch does not show yet is an orphan at the next sync, and goes then.
        """
        metadata = decode.Fields(source.metadata.others, "metadata")
        finalizers = metadata.get_text_list("finalizers")
        others = [name for name in finalizers if not name.startswith("99-")]
        if len(others) < len(finalizers):
            self._patch(source, {"metadata": {"finalizers": others}})

    def _write_status(self, source: sources.SourceObject, result: sources.ObjectResult) -> None:
        message = _format_message(result)
        if self._reported.get(source.key, "Success") != message:
            self._reported[source.key] = message
            self._report(source, message, is_warning=bool(result.problems or result.warnings))
        now = clocks.format_rfc3339(self._clock.now())
        status = _build_status(source, message, now, is_failed=bool(result.problems))
        if any(source.status.get(name) != value for name, value in status.items()):
            self._patch(source, {"status": status}, subresource="status")

    def _report(self, source: sources.SourceObject, message: str, *, is_warning: bool) -> None:
        log.log(logging.WARNING if is_warning else logging.INFO, "%s: %s", source.title, message)
        # The controllers may write no Events in the namespaces of ImagePolicies.
        if is_warning and not source.metadata.namespace:
            regarding = event_recorder.ObjectReference(
                source.kind,
                source.metadata.name,
                uid=source.metadata.uid,
                api_version=kinds.GENERATOR_KINDS[source.kind],
            )
            self._events.record_warning(regarding, "Generate", message)

    def _patch(
        self, source: sources.SourceObject, body: decode.Json, subresource: str = ""
    ) -> sources.SourceObject:
        metadata: decode.Json = {"resourceVersion": source.metadata.resource_version}
        document = self._client.patch(
            _RESOURCES[source.kind],
            source.metadata.name,
            {**body, "metadata": {**resources.get_object(body, "metadata"), **metadata}},
            namespace=source.metadata.namespace,
            subresource=subresource,
        )
        return sources.SourceObject.from_json({**document, "kind": source.kind})


def _is_ignored_change(before: object, after: object) -> bool:
    """Return whether nothing depends on the change: rendered configs, and status of pools."""
    if isinstance(before, machineconfigpool.MachineConfigPool) and isinstance(
        after, machineconfigpool.MachineConfigPool
    ):
        return _extract_inputs(before) == _extract_inputs(after)
    observed = after or before
    return isinstance(observed, render.ObservedConfig) and observed.is_rendered


def _extract_inputs(pool: machineconfigpool.MachineConfigPool) -> tuple[object, ...]:
    selectors = (pool.machine_config_selector, pool.node_selector)
    return (*selectors, pool.metadata.labels, pool.os_image, pool.os_image_tag)


def _format_message(result: sources.ObjectResult) -> str:
    if not result.problems:
        return "; ".join(["Success", *result.warnings])[:_MAX_MESSAGE]
    return f"Error: {'; '.join(dict.fromkeys(result.messages))}"[:_MAX_MESSAGE]


def _build_status(
    source: sources.SourceObject, message: str, now: str, *, is_failed: bool
) -> decode.Json:
    """Build what the status must contain: the MCO's conditions; nothing for mirror sets."""
    generation = source.metadata.generation
    legacy = {"type": "Failure" if is_failed else "Success", "status": "True"}
    conditions: list[decode.Json] = []
    if source.kind == "KubeletConfig":
        conditions.append({"type": "Accepted", "status": "False" if is_failed else "True"})
    if source.kind in generate.POOL_KINDS:
        # The last one decides for the MCO's render controller and for older tools.
        conditions.append({**legacy})
    elif source.kind in generate.POLICY_KINDS:
        state = {"status": "True" if is_failed else "False", "reason": "NoEffect"}
        if not is_failed:
            # The MCO has no condition for a policy that has all of its effect.
            state["reason"] = "Applied" if message == "Success" else "ConflictScopes"
        conditions.append({"type": "Pending", "observedGeneration": generation, **state})
    else:
        return {}
    since = {
        (entry.get_text("type"), entry.get_text("status")): entry.get_text("lastTransitionTime")
        for entry in decode.Fields(source.status, "status").iter_objects("conditions")
    }
    for condition in conditions:
        known = since.get((str(condition["type"]), str(condition["status"])))
        condition.update(message=message, lastTransitionTime=known or now)
    observed = {"observedGeneration": generation} if source.kind in generate.POOL_KINDS else {}
    return {"conditions": conditions, **observed}
