"""The plan of a PinnedImageSet: nodes, images and bytes, or why these are unknown."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.controllers.image_build.site import open_site
from tests.fixtures.objects import ROLE
from tests.registry.images import make_client, make_layer, push_image
from tests.registry.real_registry import RegistryService, lab_registry
from treenail.api import component_names
from treenail.cli.controller.main import main
from treenail.kube.resources import MACHINECONFIGPOOLS, PINNEDIMAGESETS

__all__ = ["lab_registry"]

pytestmark = pytest.mark.integration

Json = dict[str, Any]


def make_set(name: str, *images: str, role: str = "worker") -> Json:
    return {
        "apiVersion": PINNEDIMAGESETS.api_version,
        "kind": PINNEDIMAGESETS.kind,
        "metadata": {"name": name, "labels": {ROLE: role}},
        "spec": {"pinnedImages": [{"name": image} for image in images]},
    }


def test_plan_counts_the_bytes_of_pinned_images(
    tmp_path: Path,
    lab_registry: RegistryService,
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = [make_layer({name: name.encode() * 50_000}) for name in ("base", "a", "b")]
    with open_site(tmp_path, lab_registry, namespace=component_names.NAMESPACE) as site:
        client = make_client(lab_registry)
        a, b = (
            push_image(client, "os/app", name, layers=[layers[0], layer]).digest
            for name, layer in zip("ab", layers[1:], strict=True)
        )
        client.close()
        site.add_pool()
        selector = {"machineConfigSelector": {"matchLabels": {ROLE: "worker"}}}
        site.client.patch(MACHINECONFIGPOOLS, "worker", {"spec": selector})
        for number in range(2):
            site.add_node(f"n{number}", "amd64")
        host = f"{lab_registry.host}/os/app@"
        file = tmp_path / "sets.json"

        def run(*documents: Json) -> tuple[list[Json], str]:
            """Return the sets of the document, and the text."""
            file.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))
            words = ["plan", "-f", str(file), "--kubeconfig", str(site.kubeconfig)]
            main([*words, "--json"])
            found = json.loads(capsys.readouterr().out)["pinnedImageSets"]
            main(words)
            return found, capsys.readouterr().out

        nodes = {"pools": ["worker"], "nodeCount": 2, "unknownReason": ""}
        found, text = run(
            make_set("apps", host + a, host + b), make_set("other", host + a, role="infra")
        )
        size = sum(map(len, layers))
        none = {**nodes, "pools": [], "nodeCount": 0}
        assert found == [
            {"name": "apps", "imageCount": 2, "bytesPerNode": size, **nodes},
            {"name": "other", "imageCount": 1, "bytesPerNode": 0, **none},
        ]
        line = "PinnedImageSet apps: 2 images to 2 nodes of worker; to pull on each: at most"
        assert f"{line} {size} bytes\n" in text
        assert "PinnedImageSet other: 1 images to 0 nodes of no pool; " in text

        (absent,), text = run(make_set("apps", host + a, f"{host}sha256:{'0' * 64}"))
        assert absent["bytesPerNode"] is None
        assert f"cannot read the manifest {host}sha256:000" in absent["unknownReason"]
        assert "to pull on each: unknown: cannot read the manifest" in text
