"""Content keys: equal inputs of a build have equal keys, in any pool."""

import hashlib
import json

from treenail.api.decode import Json
from treenail.api.machineconfig import DEFAULT_KERNEL
from treenail.image.inputs.build_inputs import BUILDER_CONTRACT, BuildInputs

KEY_LENGTH = 16


def compute_content_key(*inputs: BuildInputs) -> str:
    """Return 16 hex digits over the inputs of one build, one for each architecture, in any order.

    Files of the rendered config change the key only if the user's text sees them. Registry and
    repository of an image do not: its digest says what it contains.
    """
    documents = sorted(
        (_list_inputs(each) for each in inputs), key=lambda each: str(each["architecture"])
    )
    document: Json = {"contract": BUILDER_CONTRACT, "inputs": documents}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def _list_inputs(inputs: BuildInputs) -> Json:
    # Without options, keys are those of builders that had none.
    options: Json = {"options": sorted(inputs.options)} if inputs.options else {}
    return {
        **options,
        "architecture": inputs.architecture,
        "base": _get_digest(inputs.base_image),
        "containerfile": inputs.user_text,
        "extensions": sorted(set(inputs.extensions)),
        "packages": _get_digest(inputs.extensions_image) if inputs.needs_packages else "",
        "kernelType": inputs.kernel_type or DEFAULT_KERNEL,
        "trustBundle": hashlib.sha256(inputs.trust_bundle.encode()).hexdigest(),
        "config": inputs.config_digest,
        "context": inputs.context_digest,
        "mounts": sorted(set(inputs.mounts)),
    }


def _get_digest(image: str) -> str:
    """Return the digest of a pull spec, or the whole text of one without a digest."""
    return image.partition("@")[2] or image
