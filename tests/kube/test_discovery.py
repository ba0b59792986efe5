"""Discovery: which resources of an API server have stored objects."""

import json

from treenail.kube.api_client import Client, Json, ResponseStream
from treenail.kube.discovery import discover_resources
from treenail.kube.request import ApiRequest, ApiResponse


def make_entry(name: str, kind: str, *verbs: str, namespaced: bool = True) -> Json:
    return {"name": name, "kind": kind, "namespaced": namespaced, "verbs": [*verbs]}


STORED = ("create", "delete", "get", "list")
DOCUMENTS: dict[str, Json] = {
    "/apis": {
        "groups": [
            {"name": "batch", "preferredVersion": {"groupVersion": "batch/v1"},
             "versions": [{"groupVersion": "batch/v1beta1"}]},
            {"name": "metrics.k8s.io", "preferredVersion": {"groupVersion": "metrics.k8s.io/v1"}},
            {"name": "down.example.com",
             "preferredVersion": {"groupVersion": "down.example.com/v1"}},
        ],
    },
    "/api/v1": {
        "resources": [
            make_entry("pods", "Pod", *STORED),
            make_entry("pods/status", "Pod", *STORED),
            make_entry("namespaces", "Namespace", *STORED, namespaced=False),
            make_entry("bindings", "Binding", "create"),
        ],
    },
    "/apis/batch/v1": {"resources": [make_entry("jobs", "Job", *STORED)]},
    "/apis/metrics.k8s.io/v1": {"resources": [make_entry("pods", "PodMetrics", "get", "list")]},
}  # fmt: skip


class DocumentTransport:
    """Answers with a document for each path, and 503 for others."""

    def send(self, request: ApiRequest) -> ApiResponse:
        document = DOCUMENTS.get(request.path)
        if document is None:
            return ApiResponse(503)
        return ApiResponse(200, json.dumps(document).encode())

    def open_stream(self, request: ApiRequest, *, duration_s: float) -> ResponseStream:
        raise AssertionError(request, duration_s)

    def close(self) -> None:
        """Do nothing."""


def test_discovery_returns_stored_kinds_and_the_failed_group() -> None:
    found, failed = discover_resources(Client(DocumentTransport()))
    assert [(item.api_version, item.plural, item.kind, item.namespaced) for item in found] == [
        ("v1", "pods", "Pod", True),
        ("v1", "namespaces", "Namespace", False),
        ("batch/v1", "jobs", "Job", True),
    ]
    assert list(failed) == ["down.example.com/v1"]
