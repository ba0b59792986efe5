"""Logs of containers: the subresource pods/log, from the files of the Nodes' kubelets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from treenail_lab.apiserver.errors import bad_request_error, not_found_error
from treenail_lab.apiserver.objects import Json, find_value
from treenail_lab.apiserver.registry.disruption_budgets import PODS
from treenail_lab.apiserver.request import ServerRequest
from treenail_lab.apiserver.storage.store import Store

_POLL_S = 0.1
_CHUNK = 1 << 16


class PodLogs:
    """The logs below the directories of the kubelets that run containers."""

    def __init__(self, store: Store) -> None:
        self.directories: list[Path] = []
        """Each has ``NAMESPACE/POD/CONTAINER.log``."""
        self._store = store

    async def stream_log(self, request: ServerRequest) -> AsyncIterator[bytes]:
        """Yield the log of a container; with ``follow`` until the container has ended."""
        pod = self._find_pod(request)
        if pod is None:
            raise not_found_error("", "pods", request.name)
        container = _choose_container(pod, request.query.get("container", ""))
        path = self._find_log(request, container)
        offset = _find_offset(path, request.read_number("tailLines")) if path else 0
        while True:
            # Before the file: what a container wrote until its end is read, too.
            is_over = not request.read_flag("follow") or _has_ended(
                self._find_pod(request), container
            )
            path = path or self._find_log(request, container)
            while path is not None and (chunk := _read_chunk(path, offset)):
                offset += len(chunk)
                yield chunk
            if is_over:
                return
            await asyncio.sleep(_POLL_S)

    def _find_pod(self, request: ServerRequest) -> Json | None:
        return self._store.find_object(PODS, (request.namespace, request.name))

    def _find_log(self, request: ServerRequest, container: str) -> Path | None:
        below = Path(request.namespace, request.name, f"{container}.log")
        found = (directory / below for directory in self.directories)
        return next((path for path in found if path.exists()), None)


def _choose_container(pod: Json, name: str) -> str:
    names, initial = (
        [each["name"] for each in find_value(pod, "spec", group) or []]
        for group in ("containers", "initContainers")
    )
    pod_name = pod["metadata"]["name"]
    if name:
        if name not in {*names, *initial}:
            raise bad_request_error(f"container {name} is not valid for pod {pod_name}")
        return name
    if len(names) > 1 or initial:
        raise bad_request_error(
            f"a container name must be specified for pod {pod_name}, choose one of: "
            f"[{' '.join([*initial, *names])}]"
        )
    return str(names[0])


def _has_ended(pod: Json | None, container: str) -> bool:
    if pod is None or find_value(pod, "status", "phase") in {"Succeeded", "Failed"}:
        return True
    for group in ("initContainerStatuses", "containerStatuses"):
        for status in find_value(pod, "status", group) or []:
            if status.get("name") == container:
                return bool(find_value(status, "state", "terminated"))
    return False


def _find_offset(path: Path, lines: int | None) -> int:
    """Return where the last lines begin; 0 without a number of them."""
    if lines is None:
        return 0
    content = path.read_bytes()
    kept = content.splitlines(keepends=True)[-lines:] if lines > 0 else []
    return len(content) - sum(map(len, kept))


def _read_chunk(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(_CHUNK)
