"""Status of a RolloutPolicy: where the rollout of each pool that names it stands.

It is only a view for users. The record that decisions need is in the status of the pool, so a
policy may be deleted and created again during a rollout.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from treenail import clocks, errors
from treenail.api import decode, machineconfigpool
from treenail.controllers.pools import maintenance_windows, rollout_policy
from treenail.controllers.rollout.decide import RolloutDecision
from treenail.controllers.rollout.writer import RolloutWriter

log = logging.getLogger(__name__)

_MAX_SUMMARIZED = 10


class RolloutState(StrEnum):
    """State of a pool's rollout, for the policy's status."""

    UPDATED = "Updated"
    PROGRESSING = "Progressing"
    PAUSED = "Paused"
    HALTED = "Halted"
    STALLED = "Stalled"


@dataclass(frozen=True, slots=True)
class PolicyStatusInput:
    """Input of `build_pool_entry`."""

    pool: machineconfigpool.MachineConfigPool
    policy: rollout_policy.RolloutPolicy
    decision: RolloutDecision
    is_updated: bool
    now: float


def build_pool_entry(status_input: PolicyStatusInput, generation: int) -> decode.Json:
    """Build the entry of a pool; ``generation`` is that of the policy."""
    decision, policy = status_input.decision, status_input.policy
    entry: decode.Json = {
        "pool": status_input.pool.name,
        "observedGeneration": generation,
        "state": str(_find_state(status_input)),
    }
    if decision.record is not None:
        target = decision.record.target
        entry["config"] = target.config
        if target.image:
            entry["image"] = target.image
        entry["wave"] = min(decision.record.wave + 1, len(policy.waves) + 1)
        entry["waves"] = len(policy.waves) + 1
        if (failure := decision.record.halted_by) is not None:
            entry["haltedBy"] = {"node": failure.node, "reason": failure.reason}
    window = maintenance_windows.find_window_state(policy.windows, status_input.now)
    if isinstance(window, maintenance_windows.WindowClosed):
        # Rounded: the time is the same at each computation until the window opens.
        opens = round(status_input.now + window.opens_in_s)
        entry["nextWindow"] = clocks.format_rfc3339(float(opens))
    return entry


def replace_pool_entry(
    observed: rollout_policy.ObservedPolicy, pool: str, entry: decode.Json | None
) -> list[decode.Json]:
    """Return the entries of the policy's status with that of the pool replaced or removed."""
    others = [other for other in read_pool_entries(observed) if other.get("pool") != pool]
    entries = others if entry is None else [*others, entry]
    return sorted(entries, key=lambda entry: str(entry.get("pool")))


def read_pool_entries(observed: rollout_policy.ObservedPolicy) -> list[decode.Json]:
    """Return the entries of the policy's status."""
    return [
        entry.values for entry in decode.Fields(observed.status, "status").iter_objects("pools")
    ]


def read_summary(observed: rollout_policy.ObservedPolicy) -> str:
    """Return the summary in the policy's status; empty without one."""
    return decode.Fields(observed.status, "status").get_text("summary")


def summarize_entries(entries: Sequence[decode.Json]) -> str:
    """Return all pools with their states in one text.

    A printer column of a kind shows the first element of a list only.
    """
    texts = []
    for entry in entries[:_MAX_SUMMARIZED]:
        halt = entry.get("haltedBy")
        by = f" by {halt.get('node')}" if isinstance(halt, dict) else ""
        texts.append(f"{entry.get('pool')} {entry.get('state')}{by}")
    if len(entries) > _MAX_SUMMARIZED:
        texts.append(f"{len(entries) - _MAX_SUMMARIZED} more")
    return ", ".join(texts)


def _find_state(status_input: PolicyStatusInput) -> RolloutState:
    record = status_input.decision.record
    if record is not None and record.halted_by is not None:
        return RolloutState.HALTED
    if status_input.decision.problem is not None:
        return RolloutState.STALLED
    if status_input.is_updated:
        return RolloutState.UPDATED
    if status_input.pool.paused:
        return RolloutState.PAUSED
    is_stalled = bool(status_input.decision.stalled_message)
    return RolloutState.STALLED if is_stalled else RolloutState.PROGRESSING


class PolicyReporter:
    """Status of the policies. Thread-safe for different pools."""

    def __init__(
        self,
        writer: RolloutWriter,
        list_policies: Callable[[], Mapping[str, rollout_policy.ObservedPolicy]],
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

    def _write_entry(
        self, observed: rollout_policy.ObservedPolicy, pool: str, entry: decode.Json | None
    ) -> None:
        entries = replace_pool_entry(observed, pool, entry)
        summary = summarize_entries(entries)
        # A kind of an older version drops the summary: each one is written once.
        has_summary = summary in (read_summary(observed), self._summaries.get(observed.name))
        if entries == read_pool_entries(observed) and has_summary:
            return
        self._summaries[observed.name] = summary
        try:
            self._writer.write_policy_status(observed, entries, summary)
        except errors.NotFoundError:
            log.debug("RolloutPolicy %s is deleted", observed.name)
