"""Uploads the base of an image to the bootstrap registry while buildah runs the Containerfile.

The layers of the base are most of an image, and known before the build ends. The push finds them in
the registry, and uploads what this has not.
"""

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from threading import Thread

from treenail.builder.build_spec import BuildDirectories, FetchedImages
from treenail.builder.layout import ImageLayout, LayoutImage
from treenail.builder.phases.push import upload_image
from treenail.errors import TreenailError
from treenail.registry.client import RegistryClient

log = logging.getLogger(__name__)


@contextmanager
def upload_base(
    client: RegistryClient, repository: str, directories: BuildDirectories, base_image: str
) -> Iterator[None]:
    """Upload the base from the layout while within, and wait for the end of the upload.

    A failure is none of the build. Closes the client.
    """
    # Before buildah adds images to the layout.
    found = _find_base(directories, base_image)
    if found is None:
        yield
        return
    # A daemon: after a signal nothing waits for it.
    thread = Thread(
        target=_upload,
        args=(client, repository, directories, found),
        name="base-upload",
        daemon=True,
    )
    thread.start()
    yield
    thread.join()


def _find_base(directories: BuildDirectories, base_image: str) -> LayoutImage | None:
    try:
        images = directories.read_fetched().images
        name = next((each.name for each in images if each.reference == base_image), None)
        return None if name is None else ImageLayout(directories.layout).read_named(name)
    except TreenailError as error:
        log.debug("cannot upload the base early: %s", error)
        return None


def _upload(
    client: RegistryClient, repository: str, directories: BuildDirectories, image: LayoutImage
) -> None:
    layout = ImageLayout(directories.layout)
    try:
        with closing(client):
            upload_image(client, repository, layout, image, FetchedImages())
    except TreenailError as error:
        log.debug("uploaded the base in part: %s", error)
    except Exception:
        # A bug in what only saves time must not end the installation.
        log.exception("cannot upload the base early")
