"""Draws docs/picture.svg: the table of ``treenail-controller status``, from a real run of the lab.

docs/picture.json keeps the objects of the cluster at that moment. By it a test finds out whether
the table looks different by now, without another run.
"""

import argparse
import json
import os
import re
import threading
from collections.abc import Sequence
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

from treenail.cli.controller.status.screen import RICH_STYLES
from treenail.cli.controller.status.text import StyledLine, format_table
from treenail.clocks import SystemClock
from treenail.controllers.pools.node_facts import NodeFacts
from treenail.controllers.pools.pool_membership import ObservedPool
from treenail.controllers.pools.rollout_policy import ObservedPolicy
from treenail.controllers.status.status_table import PoolRow, build_rows
from treenail.errors import ClusterError
from treenail.kube.resources import MACHINECONFIGPOOLS, NODES, ROLLOUTPOLICIES
from treenail_lab.cluster import POOL, Lab
from treenail_lab.command import build_scenario
from treenail_lab.demo.rollout import RolloutDemo
from treenail_lab.lifetime.owner import owner

Json = dict[str, Any]

DOCS = Path(__file__).parent.parent / "docs"
OBJECTS, PICTURE = DOCS / "picture.json", DOCS / "picture.svg"
WIDTH = 100
_TITLE = "treenail-controller status --watch"
_NODES, _MAX_UNAVAILABLE = 5, 2
_POLL_S = 0.2
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
_TEXT = re.compile(r"<text [^>]*clip-path[^>]*>([^<]*)</text>")
_KINDS = (MACHINECONFIGPOOLS, ROLLOUTPOLICIES, NODES)
_PREFERRED = ("staging", "draining", "rebooting", "verifying", "updated", "waiting")


def build_picture_rows(objects: Json) -> tuple[PoolRow, ...]:
    """Build the rows of the objects, at the time when they were read."""
    pools = [ObservedPool.from_json(each) for each in objects[MACHINECONFIGPOOLS.plural]]
    policies = [ObservedPolicy.from_json(each) for each in objects[ROLLOUTPOLICIES.plural]]
    nodes = [NodeFacts.from_json(each) for each in objects[NODES.plural]]
    return build_rows(
        {each.pool.name: each for each in pools},
        {each.name: each for each in nodes},
        {each.name: each for each in policies},
        now=objects["now"],
    )


def render_svg(lines: Sequence[StyledLine], *, title: str, width: int) -> str:
    """Return a picture of the lines as a terminal shows them. Needs the package rich."""
    from rich.console import Console  # noqa: PLC0415 - only this function needs rich
    from rich.text import Text  # noqa: PLC0415

    console = Console(file=StringIO(), record=True, width=width, force_terminal=True)
    for line in lines:
        spans = [(span, RICH_STYLES.get(style, "")) for span, style in line.spans]
        console.print(Text.assemble(*spans), no_wrap=True, crop=False)
    return console.export_svg(title=title, unique_id="rollout")


def draw_picture(objects: Json) -> str:
    """Draw the table of the objects. The picture loads no font from elsewhere."""
    lines = [*format_table(build_picture_rows(objects), WIDTH)]
    return _FONT.sub("", render_svg(lines, title=_TITLE, width=WIDTH)) + "\n"


def read_picture_text(picture: str) -> list[str]:
    """Return the texts of a picture, as far as versions of rich draw them alike."""
    found = (unescape(text).replace("\xa0", " ").strip() for text in _TEXT.findall(picture))
    return [text for text in found if text]


def main() -> None:
    """Run a rollout in the lab, and draw the moment that shows most."""
    objects = _run_rollout()
    OBJECTS.write_text(json.dumps(objects, indent=1, sort_keys=True) + "\n")
    PICTURE.write_text(draw_picture(objects))


def _run_rollout() -> Json:
    plan, scenario = build_scenario(
        argparse.Namespace(
            nodes=_NODES, size=1200, speed=200, image=None, file=None, fail=None, limit=600.0
        )
    )
    best: tuple[int, Json] = (-1, {})
    with (
        owner.temporary_directory() as directory,
        Path(os.devnull).open("w") as nowhere,
        Lab(directory, plan) as lab,
    ):
        demo = RolloutDemo(lab, scenario, SystemClock(), nowhere)
        try:
            demo.prepare_pool()
            wide = {"spec": {"maxUnavailable": _MAX_UNAVAILABLE}}
            lab.client.patch(MACHINECONFIGPOOLS, POOL, wide)
            rollout = threading.Thread(target=demo.run_rollout, name="rollout")
            rollout.start()
            while rollout.is_alive():
                objects = _read_objects(lab)
                if objects and (score := rate_moment(build_picture_rows(objects))) > best[0]:
                    best = (score, objects)
                rollout.join(_POLL_S)
        finally:
            demo.stop()
    return best[1]


def rate_moment(rows: Sequence[PoolRow]) -> int:
    """Rate how much of a rollout the rows show: different phases, and a percentage."""
    nodes = [node for row in rows for node in row.nodes]
    phases = {node.phase for node in nodes}
    has_percentage = any(node.staging_percent for node in nodes)
    return sum(phase in phases for phase in _PREFERRED) + 2 * has_percentage


def _read_objects(lab: Lab) -> Json:
    try:
        found = {kind.plural: lab.client.list(kind).items for kind in _KINDS}
    except ClusterError:
        return {}
    for kind in _KINDS:
        for each in found[kind.plural]:
            metadata = each["metadata"]
            if isinstance(metadata, dict):
                metadata.pop("managedFields", None)
    return {"now": SystemClock().now(), **found}


if __name__ == "__main__":
    main()
