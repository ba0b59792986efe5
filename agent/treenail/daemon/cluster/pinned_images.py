"""Pulls and pins the images of the PinnedImageSets of this node, and reports on each set.

It runs in a process of its own, so that no update waits for it. It reads everything again: the
process may end at any point, and another one begins at the start.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from treenail import clocks, errors
from treenail.api import annotations as key
from treenail.api import decode, machineconfignode, object_meta, pullspec
from treenail.api.object_meta import Condition
from treenail.api.pinnedimageset import PinnedImageSet, parse_pinned_set
from treenail.config import node_paths, pullsecret
from treenail.daemon.cluster.pull_secrets import AUTH_FILE
from treenail.host.container.cri import ImageRuntime
from treenail.host.container.registry import SkopeoClient
from treenail.host.machine import Machine
from treenail.kube import api_client, resources
from treenail.update import pinned_images, status

log = logging.getLogger(__name__)

T = TypeVar("T")
Problems = Mapping[str, str]
"""Why sets are not complete, by their names."""

_PULL_S, _INSPECT_S = 3600.0, 30.0
_PARALLEL = 2
_PROGRESSING, _DEGRADED = "PinnedImageSetsProgressing", "PinnedImageSetsDegraded"
_COMPLETE = (
    Condition(_PROGRESSING, "False", "AsExpected", "All pinned image sets complete"),
    Condition(_DEGRADED, "False", "AsExpected", "All is good"),
)


class PinnedImagesJob:
    """One pass over all sets of the node. Raises `ClusterError`."""

    def __init__(self, machine: Machine, client: api_client.Client, node: str) -> None:
        self._machine, self._client, self._node = machine, client, node

    def run(self) -> bool:
        """Pull, pin and report; return whether every set is complete."""
        sets, problems = self._read_sets()
        try:
            problems = self._complete_sets(sets, problems)
        except errors.HostError as error:
            if not sets:
                raise
            problems = {pinned.metadata.name: status.format_reason(error) for pinned in sets}
        text = "; ".join(f"PinnedImageSet {name}: {problem}" for name, problem in problems.items())
        failed = Condition(_DEGRADED, "True", "PrefetchFailed", text[: key.REASON_LIMIT])
        self._report(sets, problems, *((failed,) if problems else _COMPLETE))
        log.info("PinnedImageSets: %s", text or "complete")
        return not problems

    def _read_sets(self) -> tuple[list[PinnedImageSet], Problems]:
        """Read the sets that the Node names; a deleted one is none, an invalid one has no image."""
        sets, problems = [], {}
        node = object_meta.read_metadata(self._client.get(resources.NODES, self._node))
        for entry in filter(None, node.annotations.get(key.PINNED_IMAGE_SETS, "").split(",")):
            name = entry.rpartition("@")[0]
            if (document := self._client.find(resources.PINNEDIMAGESETS, name)) is None:
                continue
            try:
                sets.append(parse_pinned_set(document))
            except errors.ConfigError as error:
                problems[name] = status.format_reason(error)
                sets.append(PinnedImageSet(object_meta.read_metadata(document)))
        return sets, problems

    def _complete_sets(self, sets: Sequence[PinnedImageSet], problems: Problems) -> Problems:
        """Pull and pin; return the problem of each set that is not complete."""
        files, runtime = self._machine.files, ImageRuntime(self._machine)
        present = runtime.list_images()
        wanted = dict.fromkeys(image for pinned in sets for image in pinned.images)
        failures: Mapping[str, str] = {}
        if missing := [image for image in wanted if image not in present]:
            message = f"node is prefetching images: {self._node}"
            self._report(sets, None, Condition(_PROGRESSING, "True", "ImagePrefetch", message))
            usable_bytes, inspected = runtime.read_usable_bytes(), self._inspect_images(missing)
            plan = pinned_images.plan_pulls(sets, present, usable_bytes, inspected)
            problems = {**problems, **plan.problems}
            failures = self._pull_images(runtime, plan.images)
            present = runtime.list_images()
        recorded = (files.read_file(node_paths.PINNED_IMAGES) or b"").decode().split()
        before = frozenset(recorded)
        pins, problems = pinned_images.choose_pins(sets, present, before, problems, failures)
        # Another process must find all that this one may leave pinned.
        files.write_file(node_paths.PINNED_IMAGES, "\n".join(before.union(pins)).encode())
        runtime.pin_images(pins, present & before.difference(pins))
        files.write_file(node_paths.PINNED_IMAGES, "\n".join(pins).encode())
        if not pins:
            files.remove_file(node_paths.PINNED_IMAGES)
        return problems

    def _inspect_images(self, images: Collection[str]) -> Mapping[str, pinned_images.Inspection]:
        machine = self._machine
        skopeo = SkopeoClient(machine.programs, machine.clock, timeout_s=_INSPECT_S)
        path = machine.root.resolve_path(AUTH_FILE)
        auth_file = str(path) if path.exists() else ""
        return _map_parallel(partial(skopeo.inspect_image, auth_file=auth_file), images)

    def _pull_images(self, runtime: ImageRuntime, images: Collection[str]) -> Mapping[str, str]:
        """Pull the images until the disk is full; return the error of each, empty without one."""
        content = self._machine.files.read_file(AUTH_FILE) or b'{"auths": {}}'
        secret = pullsecret.parse_pull_secret(content, where=AUTH_FILE)

        def pull(image: str) -> str:
            spec = pullspec.parse_pull_spec(image, where="image")
            login = pullsecret.find_credential(secret, spec.registry, spec.repository)
            try:
                if runtime.read_usable_bytes() < 0:
                    return "the disk is full"
                runtime.pull_image(image, login.auth if login else "", timeout_s=_PULL_S)
            except errors.CommandError as error:
                # crictl prints warnings before the cause.
                return error.stderr.rpartition("desc = ")[2] or str(error)
            return ""

        return _map_parallel(pull, images)

    def _report(
        self, sets: Sequence[PinnedImageSet], problems: Problems | None, *news: Condition
    ) -> None:
        """Report on the MachineConfigNode if there is one; ``problems`` is None until the end."""
        shown: list[decode.Json] = []
        for pinned in sets:
            name, generation = pinned.metadata.name, pinned.metadata.generation
            shown.append({"name": name, "desiredGeneration": generation})
            if problems and name in problems:
                shown[-1]["lastFailedGeneration"] = generation
                shown[-1]["lastFailedGenerationError"] = problems[name]
            elif problems is not None:
                shown[-1]["currentGeneration"] = generation
        resource = resources.MACHINECONFIGNODES
        patch = partial(self._client.patch, resource, self._node, subresource="status")
        # An apply of no set would set the list to null, which the API server rejects.
        cleared: decode.Json = {} if shown else {"status": {"pinnedImageSets": None}}
        try:
            # The answer, also to an empty patch, is the object, which a node may not get.
            known = machineconfignode.MachineConfigNode.from_json(patch(cleared)).conditions
        except errors.NotFoundError:
            return
        own = [condition for condition in known if condition.type in (_PROGRESSING, _DEGRADED)]
        now = clocks.format_rfc3339(self._machine.clock.now())
        conditions = [one.to_json() for one in object_meta.merge_conditions(own, news, now=now)]
        body: decode.Json = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "status": {"conditions": conditions, **({"pinnedImageSets": shown} if shown else {})},
        }
        patch(body, api_client.PatchType.APPLY)


def _map_parallel(function: Callable[[str], T], images: Collection[str]) -> Mapping[str, T]:
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="pinned-images") as pool:
        return dict(zip(images, pool.map(function, images), strict=True))
