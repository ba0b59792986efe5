"""The custom resource definitions that treenail brings along, in the reference's API group."""

from importlib import resources

import yaml

Json = dict[str, object]


def load_crds() -> list[Json]:
    """Every CustomResourceDefinition, in a fixed order."""
    folder = resources.files("treenail.controllers.install").joinpath("manifests")
    files = sorted(
        (entry for entry in folder.iterdir() if entry.name.endswith(".yaml")),
        key=lambda entry: entry.name,
    )
    return [yaml.safe_load(entry.read_text("utf-8")) for entry in files]
