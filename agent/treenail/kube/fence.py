"""Writes of a process that may lose its lead: not sent, or undone if they come too late."""

from collections.abc import Callable
from contextlib import suppress

from treenail.errors import ConflictError, NotFoundError, NotLeaderError
from treenail.kube.client import Client, Json, ResponseStream, Transport
from treenail.kube.request import ApiRequest, ApiResponse
from treenail.kube.resources import Resource, get_object


class LeaderTransport:
    """Checks the lead directly before each write, and passes reads on.

    A process may be paused between its decision and the write, for minutes. Then another process
    leads, and the decision is outdated.
    """

    def __init__(self, transport: Transport, is_leader: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_leader = is_leader

    def send(self, request: ApiRequest) -> ApiResponse:
        """Send the request; raise NotLeaderError for a write without the lead."""
        if request.method != "GET" and not self._is_leader():
            raise NotLeaderError(
                f"{request.method} {request.path} was not sent: this process no longer leads"
            )
        return self._transport.send(request)

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream:
        """Open a watch."""
        return self._transport.open_stream(request, duration_s=duration_s)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


class LateWrites:
    """Deletes objects that this process created after its lead had ended.

    `LeaderTransport` cannot prevent that: the process may be paused while it sends, and the next
    leader may have cleaned up before the request arrives.
    """

    def __init__(self, client: Client, is_leader: Callable[[], bool]) -> None:
        """``client`` writes without the lead, too."""
        self._client = client
        self._is_leader = is_leader

    def check_created(self, resource: Resource, created: Json) -> None:
        """Without the lead, delete a created object and raise NotLeaderError.

        An object that another client changed since then stays. An update with equal content
        changes no resourceVersion, so the object needs a part that differs for each process.
        """
        if self._is_leader():
            return
        meta = {key: str(value) for key, value in get_object(created, "metadata").items()}
        with suppress(ConflictError, NotFoundError):
            self._client.delete(
                resource,
                meta["name"],
                namespace=meta.get("namespace", ""),
                uid=meta["uid"],
                resource_version=meta["resourceVersion"],
            )
        raise NotLeaderError(
            f"{resource.kind} {meta['name']} was created too late and deleted: "
            "this process no longer leads"
        )
