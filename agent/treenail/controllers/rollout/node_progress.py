"""How far the update of a node is, for tables and pages. No decision depends on it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api import annotations as key
from treenail.api.annotations import NodeState
from treenail.api.decode import Fields, load_json
from treenail.clock import parse_rfc3339
from treenail.errors import ConfigError

_PERCENT = re.compile(r"(100|[1-9]?[0-9])%")


@dataclass(frozen=True, slots=True)
class NodeProgress:
    """Progress of a node's update, and its last time out of service."""

    phase: str = ""
    """Phase of the update in progress, as the annotations imply it; empty without an update."""
    percent: int | None = None
    """Of the transaction of the operating system; None while no agent reports one."""
    os_image: str = ""
    """Name of the booted operating system, as the kubelet reports it."""
    drain_began_at: float | None = None
    """Begin of the drain in progress; None without one."""
    last_outage_s: float | None = None
    """How long the last drain kept the node out of service; None before the first one."""


def parse_progress(
    annotations: Mapping[str, str],
    status: Fields,
    *,
    ready_again_at: float | None,
    started_at: float | None,
    has_target: bool,
) -> NodeProgress:
    """Parse the progress from a Node's annotations and status.

    ``ready_again_at`` is since when the node is ready, None while it is not; ``started_at`` is when
    it got its target; ``has_target`` says that the agent reports its desired target as the current
    one.
    """
    drain_began_at = _parse_drain_begin(annotations.get(key.DRAIN))
    phase = _parse_phase(annotations)
    if phase == "staging" and has_target:
        # The uncordon is done, and the agent is about to report Done.
        phase = "uncordoning"
    began_at = drain_began_at or started_at
    if phase == "rebooting" and began_at and ready_again_at and ready_again_at > began_at:
        # The kubelet stopped after the drain began, and is ready again: the node has booted.
        phase = "verifying"
    percent = _PERCENT.fullmatch(annotations.get(key.PROGRESS, ""))
    return NodeProgress(
        phase=phase,
        percent=int(percent[1]) if percent and phase == "staging" else None,
        os_image=_parse_os_image(status),
        drain_began_at=drain_began_at,
        last_outage_s=_parse_outage_s(annotations.get(key.LAST_OUTAGE, "")),
    )


def _parse_phase(annotations: Mapping[str, str]) -> str:
    if annotations.get(key.STATE) != NodeState.WORKING:
        return ""
    if annotations.get(key.POST_CONFIG_ACTION):
        return "rebooting"
    requested = annotations.get(key.DESIRED_DRAIN, "")
    is_drain = requested.startswith("drain-")
    if requested != annotations.get(key.LAST_APPLIED_DRAIN, ""):
        return "draining" if is_drain else "uncordoning"
    return "applying" if is_drain else "staging"


def _parse_os_image(status: Fields) -> str:
    try:
        return status.get_object("nodeInfo").get_text("osImage")
    except ConfigError:
        return ""


def _parse_drain_begin(text: str | None) -> float | None:
    if not text:
        return None
    try:
        record = Fields.from_json(load_json(text, where=f"annotation {key.DRAIN}"), "")
        return parse_rfc3339(record.get_text("began"))
    except ConfigError:
        return None


def _parse_outage_s(text: str) -> float | None:
    before, _, after = text.partition("/")
    began, ended = parse_rfc3339(before), parse_rfc3339(after)
    if began is None or ended is None or ended < began:
        return None
    return ended - began
