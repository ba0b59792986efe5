"""Resolve the tags of pools, and record the digests in their status."""

import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from treenail import clocks, errors
from treenail.api import machineconfigpool, object_meta
from treenail.api.node import DEFAULT_ARCHITECTURE
from treenail.controllers.pools import (
    expected_writes,
    image_tags,
    node_facts,
    registry_requests,
    rollout_policy,
)
from treenail.controllers.rollout.writer import RolloutWriter
from treenail.kube import event_recorder

log = logging.getLogger(__name__)

_MAX_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class TagDependencies:
    """Collaborators of the updates of tags beside the cluster."""

    source: registry_requests.TagSource
    executor: Executor
    """Runs the requests to registries."""
    notify: Callable[[str], None]
    """Gets the name of a pool whose answer has arrived."""
    metrics: registry_requests.TagMetrics | None = None


@dataclass(frozen=True, slots=True)
class TagResult:
    """The pool after the check of its tag."""

    pool: machineconfigpool.MachineConfigPool
    condition: object_meta.Condition | None = None
    """None for a pool that never had a tag."""
    requeue_after_s: float | None = None


class ImageTagUpdater:
    """Tags of all pools. Thread-safe for different pools."""

    def __init__(
        self,
        dependencies: TagDependencies,
        writer: RolloutWriter,
        pools: expected_writes.ExpectedPools,
        events: event_recorder.EventRecorder,
        clock: clocks.Clock,
    ) -> None:
        self._source = dependencies.source
        self._metrics = dependencies.metrics
        self._requests: registry_requests.RegistryRequests[image_tags.TagQuestion] = (
            registry_requests.RegistryRequests(dependencies.executor, clock, dependencies.notify)
        )
        self._writer = writer
        self._pools = pools
        self._events = events
        self._clock = clock

    def refresh_tag(
        self,
        pool: machineconfigpool.MachineConfigPool,
        policies: Mapping[str, rollout_policy.ObservedPolicy],
        nodes: Iterable[node_facts.NodeFacts],
    ) -> TagResult:
        """Ask, record and report as necessary; raise `ClusterError` of a write.

        A pool with an invalid tag or policy stays as it is; the rollout reports these.
        """
        try:
            image_tags.check_tag(pool)
            windows = rollout_policy.find_policy(pool, policies).windows
        except errors.ConfigError:
            return TagResult(pool)
        login = self._find_login(pool)
        for _ in range(_MAX_ROUNDS):
            facts = image_tags.make_tag_facts(pool, windows)
            self._requests.keep_answers(pool.name, facts.concerns)
            find_answer = partial(image_tags.find_tag_answer, self._requests.get_answers(pool.name))
            decision = image_tags.decide_pool_tag(
                pool.name,
                facts,
                find_answer,
                self._clock.now(),
                login=login if facts.is_unresolved else "",
            )
            status = image_tags.make_tag_status(facts, decision)
            if status is not None:
                pool = self._pools.record_write(pool, self._writer.write_image_tag(pool, status))
                self._report_change(pool, decision.change)
                continue
            if decision.question is not None:
                self._ask_registry(pool, decision.question, nodes)
            return TagResult(pool, decision.condition, decision.requeue_after_s)
        return TagResult(pool, requeue_after_s=1.0)

    def _find_login(self, pool: machineconfigpool.MachineConfigPool) -> str:
        tag = pool.os_image_tag
        if tag is None or not image_tags.make_tag_facts(pool).is_unresolved:
            return ""
        try:
            return self._source.compute_access_version(tag.pull_secret)
        except errors.TreenailError as error:
            # The resolution fails with the same cause, and reports it.
            log.debug("cannot read the login of pool %s: %s", pool.name, error)
            return ""

    def _ask_registry(
        self,
        pool: machineconfigpool.MachineConfigPool,
        question: image_tags.TagQuestion,
        nodes: Iterable[node_facts.NodeFacts],
    ) -> None:
        tag = pool.os_image_tag
        assert tag is not None
        known = node_facts.find_architectures(node.architecture for node in nodes)
        architectures = known or frozenset({DEFAULT_ARCHITECTURE})
        self._requests.ask(
            pool.name,
            question.image,
            question,
            lambda: self._source.resolve_tag(question.image, architectures, tag.pull_secret),
        )

    def _report_change(
        self, pool: machineconfigpool.MachineConfigPool, change: image_tags.TagChange | None
    ) -> None:
        if change is None:
            return
        regarding = event_recorder.ObjectReference(
            machineconfigpool.KIND,
            pool.name,
            pool.metadata.uid,
            api_version=machineconfigpool.API_VERSION,
        )
        if change.is_warning:
            self._events.record_warning(regarding, change.reason, change.message)
            log.warning("pool %s: %s", pool.name, change.message)
        else:
            self._events.record_normal(regarding, change.reason, change.message)
            log.info("pool %s: %s", pool.name, change.message)
        if self._metrics is not None:
            self._metrics.record_change(change, pool.name)
