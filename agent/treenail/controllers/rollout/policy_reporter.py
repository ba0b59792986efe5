"""Writes the rollout of each pool to the status of the policy that the pool names."""

import logging
from collections.abc import Callable, Mapping

from treenail.api.decode import Json
from treenail.controllers.pools.policy import ObservedPolicy
from treenail.controllers.rollout.policy_status import (
    PolicyStatusInput,
    build_pool_entry,
    read_pool_entries,
    read_summary,
    replace_pool_entry,
    summarize_entries,
)
from treenail.controllers.rollout.writer import RolloutWriter
from treenail.errors import NotFoundError

log = logging.getLogger(__name__)


class PolicyReporter:
    """Status of the policies. Thread-safe for different pools."""

    def __init__(
        self, writer: RolloutWriter, list_policies: Callable[[], Mapping[str, ObservedPolicy]]
    ) -> None:
        self._writer = writer
        self._list_policies = list_policies
        self._summaries: dict[str, str] = {}

    def report_pool(self, status_input: PolicyStatusInput) -> None:
        """Show the pool in the status of its policy, and of no other; raises `ClusterError`."""
        pool = status_input.pool
        for observed in self._list_policies().values():
            is_named = observed.name == pool.rollout_policy
            entry = build_pool_entry(status_input, observed.generation) if is_named else None
            self._write_entry(observed, pool.name, entry)

    def remove_pool(self, pool: str) -> None:
        """Remove a deleted pool from the status of every policy; raises `ClusterError`."""
        for observed in self._list_policies().values():
            self._write_entry(observed, pool, None)

    def _write_entry(self, observed: ObservedPolicy, pool: str, entry: Json | None) -> None:
        entries = replace_pool_entry(observed, pool, entry)
        summary = summarize_entries(entries)
        # A kind of an older version drops the summary: each one is written once.
        has_summary = summary in (read_summary(observed), self._summaries.get(observed.name))
        if entries == read_pool_entries(observed) and has_summary:
            return
        self._summaries[observed.name] = summary
        try:
            self._writer.write_policy_status(observed, entries, summary)
        except NotFoundError:
            log.debug("RolloutPolicy %s is deleted", observed.name)
