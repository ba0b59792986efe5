"""Objects of a test in a cluster that other tests use, too."""

import secrets
from typing import Any

from treenail.errors import NotFoundError
from treenail.kube.api_client import Client, Json, PatchType
from treenail.kube.resources import Resource


class Objects:
    """Objects of one test, which all have its name and are deleted at its end."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.name = f"treenail-test-{secrets.token_hex(3)}"
        self._resources: list[Resource] = []

    def make(self, resource: Resource, **more: object) -> Json:
        self._resources.append(resource)
        return self.client.create(resource, self.document(resource, **more))

    def apply(self, resource: Resource, **more: object) -> Json:
        self._resources.append(resource)
        body = self.document(resource, **more)
        return self.client.patch(resource, self.name, body, PatchType.APPLY)

    def write_status(self, resource: Resource, status: object) -> Json:
        body: Json = {"status": status}  # type: ignore[dict-item]  # JSON
        return self.client.patch(resource, self.name, body, subresource="status")

    def document(self, resource: Resource, **more: object) -> Json:
        found: dict[str, Any] = {
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {"name": self.name},
            **more,
        }
        return found

    def remove(self) -> None:
        for resource in dict.fromkeys(self._resources):
            try:
                self.client.delete(resource, self.name)
            except NotFoundError:
                continue
