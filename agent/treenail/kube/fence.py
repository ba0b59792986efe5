"""Transport that sends writes only while this process leads."""

from collections.abc import Callable

from treenail.errors import NotLeaderError
from treenail.kube.client import ResponseStream, Transport
from treenail.kube.request import ApiRequest, ApiResponse


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
