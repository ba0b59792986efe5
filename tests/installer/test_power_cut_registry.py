"""The bootstrap registry after a power cut: docker-registry flushes files, but not their names."""

import json
import shutil
from pathlib import Path

import pytest

from tests.builder.base_image import needs_busybox
from tests.builder.builds import push_base
from tests.builder.sandboxing import needs_buildah
from tests.installer.pool_builds import InstallSite, RecordingContext
from tests.installer.registries import make_registry, open_client
from tests.registry.real_registry import RegistryService, lab_registry, needs_docker_registry
from treenail.installer.directory.install_files import InstallFiles
from treenail.registry.images import has_complete_image

__all__ = ["lab_registry"]
pytestmark = [pytest.mark.integration, needs_docker_registry]

TEXT = "FROM configs AS final\nRUN echo built > /usr/lib/built\n"


class FlushedFiles(InstallFiles):
    """Files that remember which paths were flushed before each write."""

    def __init__(self) -> None:
        self.flushed: set[str] = set()
        self.before_record: set[str] = set()

    def write(self, path: Path, content: bytes, *, mode: int = 0o600) -> bool:
        if path.name.startswith("machineosbuild-"):
            self.before_record = set(self.flushed)
        return super().write(path, content, mode=mode)

    def _sync_descriptor(self, descriptor: int) -> None:
        self.flushed.add(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        super()._sync_descriptor(descriptor)


def find_blob(storage: Path, digest: str) -> Path:
    algorithm, _, name = digest.partition(":")
    found = storage / "docker/registry/v2/blobs" / algorithm / name[:2] / name
    assert found.is_dir()
    return found


def test_storage_is_flushed_before_the_build_is_recorded(
    tmp_path: Path, lab_registry: RegistryService
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    site.files = files = FlushedFiles()
    site.push_base()
    site.write()
    with make_registry(tmp_path, files=files) as registry:
        image = site.build(registry)
        blob = find_blob(registry.storage, image.digest)
        wanted = [blob / "data", blob, *list(blob.parents)[:7]]
        assert registry.storage in wanted
        assert {str(each) for each in wanted} <= files.before_record


@needs_buildah
@needs_busybox
@pytest.mark.parametrize(("text", "is_recorded"), [("", True), ("", False), (TEXT, False)])
def test_image_that_lost_a_blob_is_completed(
    tmp_path: Path, lab_registry: RegistryService, text: str, *, is_recorded: bool
) -> None:
    site = InstallSite(tmp_path, lab_registry)
    if text:
        site.base = push_base(lab_registry, tmp_path)
    else:
        site.push_base()
    site.text = text
    site.write()
    with make_registry(tmp_path) as registry:
        image = site.build(registry)
        with open_client(registry, is_push=False) as client:
            manifest = client.get_manifest("os/node", image.digest)
        layer = json.loads(manifest.content)["layers"][0]["digest"]
        shutil.rmtree(find_blob(registry.storage, layer))
    if not is_recorded:
        (site.directory.cluster_objects / "machineosbuild-master.json").unlink()
    context = RecordingContext()
    with make_registry(tmp_path) as registry:
        again = site.build(registry, context)
        with open_client(registry, is_push=False) as client:
            assert has_complete_image(client, "os/node", again.digest)
    assert context.waits == []
    if not text:
        assert again.digest == image.digest
