"""The provenance of an image: an in-toto statement with SLSA provenance 1.0."""

from collections.abc import Mapping
from dataclasses import dataclass

from treenail.api.pullspec import parse_pull_spec
from treenail.image.oci.documents import encode

STATEMENT_TYPE = "application/vnd.in-toto+json"
"""The artifact type of an attached statement."""
_STATEMENT = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://slsa.dev/provenance/v1"
_BUILD_TYPE = "https://treenail.io/image-build/v1"
_BUILDER = "https://treenail.io/builder"


@dataclass(frozen=True, slots=True)
class BuildProvenance:
    """Inputs and circumstances of one build."""

    name: str
    """The repository of the image with its registry."""
    digest: str
    materials: tuple[str, ...]
    """Pull specs with digests: base image, extensions image."""
    machine_config: str
    pool: str
    build: str
    content_key: str
    containerfile_digest: str
    """Empty without a Containerfile."""
    version: str
    """The version of the builder."""
    started: str
    """RFC 3339; empty if unknown."""
    finished: str


def make_statement(provenance: BuildProvenance) -> bytes:
    """Return the statement; raises `ConfigError` for a material without a digest."""
    parameters = {
        "machineConfig": provenance.machine_config,
        "machineConfigPool": provenance.pool,
        "contentKey": provenance.content_key,
    }
    if provenance.containerfile_digest:
        parameters["containerfile"] = provenance.containerfile_digest
    return encode(
        {
            "_type": _STATEMENT,
            "subject": [{"name": provenance.name, "digest": _split_digest(provenance.digest)}],
            "predicateType": _PREDICATE,
            "predicate": {
                "buildDefinition": {
                    "buildType": _BUILD_TYPE,
                    "externalParameters": parameters,
                    "resolvedDependencies": [
                        _describe_material(material) for material in provenance.materials
                    ],
                },
                "runDetails": {
                    "builder": {"id": _BUILDER, "version": {"treenail": provenance.version}},
                    "metadata": {
                        "invocationId": provenance.build,
                        **({"startedOn": provenance.started} if provenance.started else {}),
                        "finishedOn": provenance.finished,
                    },
                },
            },
        }
    )


def _describe_material(pull_spec: str) -> Mapping[str, object]:
    spec = parse_pull_spec(pull_spec, where="material")
    return {
        "uri": f"docker://{spec.registry}/{spec.repository}",
        "digest": _split_digest(spec.digest),
    }


def _split_digest(digest: str) -> Mapping[str, str]:
    algorithm, _, value = digest.partition(":")
    return {algorithm: value}
