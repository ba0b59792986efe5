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
from treenail.api.machineconfigpool import PinnedImageSet
from treenail.api.object_meta import Condition
from treenail.config import node_paths, pullsecret
from treenail.daemon.cluster.pull_secrets import AUTH_FILE
from treenail.host.container.registry import SkopeoClient
from treenail.host.cri.images import ImageRuntime
from treenail.host.machine import Machine
from treenail.kube import api_client, resources
from treenail.update import pinned_images, status

log = logging.getLogger(__name__)

T = TypeVar("T")

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
        node = object_meta.read_metadata(self._client.get(resources.NODES, self._node))
        entries = node.annotations.get(key.PINNED_IMAGE_SETS, "").split(",")
        names = filter(None, (entry.rpartition("@")[0] for entry in entries))
        # A deleted set is none.
        found = [self._client.find(resources.PINNEDIMAGESETS, name) for name in names]
        sets = [PinnedImageSet.from_json(document) for document in found if document is not None]
        try:
            problems = self._complete_sets(sets)
        except (errors.ConfigError, errors.HostError) as error:
            if not sets:
                raise
            problems = {pinned.metadata.name: status.format_reason(error) for pinned in sets}
        text = "; ".join(f"PinnedImageSet {name}: {problem}" for name, problem in problems.items())
        failed = Condition(_DEGRADED, "True", "PrefetchFailed", text[: key.REASON_LIMIT])
        self._report(sets, problems, *((failed,) if problems else _COMPLETE))
        log.info("PinnedImageSets: %s", text or "complete")
        return not problems

    def _complete_sets(self, sets: Sequence[PinnedImageSet]) -> Mapping[str, str]:
        """Pull and pin; return the problem of each set that is not complete, by its name."""
        files, runtime = self._machine.files, ImageRuntime(self._machine)
        present = runtime.list_images()
        invalid, failures = pinned_images.find_invalid(sets), dict[str, str]()
        valid = [pinned for pinned in sets if pinned.metadata.name not in invalid]
        wanted = {
            image: pullspec.parse_pull_spec(image, where="a pinned image")
            for pinned in valid
            for image in pinned.images
        }
        problems: dict[str, str] = {}
        if missing := [image for image in wanted if image not in present]:
            message = f"node is prefetching images: {self._node}"
            self._report(sets, None, Condition(_PROGRESSING, "True", "ImagePrefetch", message))
            usable_bytes, inspected = runtime.read_usable_bytes(), self._inspect_images(missing)
            pulls, problems = pinned_images.plan_pulls(valid, present, usable_bytes, inspected)
            failures = self._pull_images(runtime, {image: wanted[image] for image in pulls})
            present = runtime.list_images()
        recorded = (files.read_file(node_paths.PINNED_IMAGES) or b"").decode().split()
        before = frozenset(recorded)
        problems |= invalid
        pins, problems = pinned_images.choose_pins(sets, present, before, problems, failures)
        if pins or before:
            # Another process must find all that this one may leave pinned.
            files.write_file(node_paths.PINNED_IMAGES, "\n".join(before.union(pins)).encode())
            runtime.pin_images(pins, present & before.difference(pins))
            files.write_file(node_paths.PINNED_IMAGES, "\n".join(pins).encode())
        if not pins:
            files.remove_file(node_paths.PINNED_IMAGES)
        return problems

    def _inspect_images(self, images: Collection[str]) -> dict[str, pinned_images.Inspection]:
        machine, path = self._machine, self._machine.root.resolve_path(AUTH_FILE)
        skopeo = SkopeoClient(machine.programs, machine.clock, timeout_s=_INSPECT_S)
        auth_file = str(path) if path.exists() else ""
        return _map_parallel(partial(skopeo.inspect_image, auth_file=auth_file), images)

    def _pull_images(
        self, runtime: ImageRuntime, images: Mapping[str, pullspec.PullSpec]
    ) -> dict[str, str]:
        """Pull the images until the disk is full; return the error of each, empty without one."""
        content = self._machine.files.read_file(AUTH_FILE) or b'{"auths": {}}'
        secret = pullsecret.parse_pull_secret(content, where=AUTH_FILE)

        def pull(image: str) -> str:
            spec = images[image]
            login = pullsecret.find_credential(secret, spec.registry, spec.repository)
            if runtime.read_usable_bytes() < 0:
                return "the disk is full"
            try:
                runtime.pull_image(image, login.auth if login else "", timeout_s=_PULL_S)
            except errors.CommandError as error:
                # crictl prints warnings before the cause.
                return error.stderr.rpartition("desc = ")[2] or str(error)
            return ""

        return _map_parallel(pull, images)

    def _report(
        self,
        sets: Sequence[PinnedImageSet],
        problems: Mapping[str, str] | None,
        *news: Condition,
    ) -> None:
        """Report on the MachineConfigNode if there is one; ``problems`` is None until the end."""
        shown: list[decode.Json] = []
        for meta in (pinned.metadata for pinned in sets):
            shown.append({"name": meta.name, "desiredGeneration": meta.generation})
            if problems and meta.name in problems:
                shown[-1]["lastFailedGeneration"] = meta.generation
                shown[-1]["lastFailedGenerationError"] = problems[meta.name]
            elif problems is not None:
                shown[-1]["currentGeneration"] = meta.generation
        resource = resources.MACHINECONFIGNODES
        patch = partial(self._client.patch, resource, self._node, subresource="status")
        # An apply of no set would set the list to null, which the API server rejects.
        cleared: decode.Json = {} if shown else {"status": {"pinnedImageSets": None}}
        try:
            # The answer, also to an empty patch, is the object, which a node may not get.
            present = machineconfignode.MachineConfigNode.from_json(patch(cleared)).conditions
        except errors.NotFoundError:
            return
        own = [condition for condition in present if condition.type in (_PROGRESSING, _DEGRADED)]
        now = clocks.format_rfc3339(self._machine.clock.now())
        conditions = [one.to_json() for one in object_meta.merge_conditions(own, news, now=now)]
        content = {"conditions": conditions, **({"pinnedImageSets": shown} if shown else {})}
        body: decode.Json = {"apiVersion": resource.api_version, "kind": resource.kind}
        patch({**body, "status": content}, api_client.PatchType.APPLY)


def _map_parallel(function: Callable[[str], T], images: Collection[str]) -> dict[str, T]:
    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="pinned-images") as pool:
        return dict(zip(images, pool.map(function, images), strict=True))
