"""Builds on this host, with a base in a registry that the test runs."""

import getpass
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.builder.base_image import ARCHITECTURE, write_base_image
from treenail.builder.build_layout import ImageLayout
from treenail.builder.build_spec import BuildSpec, FetchOutput
from treenail.builder.buildah.program import choose_id_maps
from treenail.builder.local import LocalBuild, LocalBuilder, LocalSettings
from treenail.builder.phases.transfers import upload_image
from treenail.clocks import SystemClock
from treenail.image.build_result import BuildPhase, BuildResult
from treenail.registry.authorization import Login
from treenail.registry.client import RegistryClient
from treenail.registry.transport import TlsSettings
from treenail_lab.registry.service import PULLER, PUSHER, RegistryService

BASE_REPOSITORY = "os/base"


@contextmanager
def open_client(registry: RegistryService, user: str = PUSHER) -> Iterator[RegistryClient]:
    client = RegistryClient(
        registry.host,
        SystemClock(),
        login=Login(user, registry.passwords[user]),
        tls=TlsSettings(ca_pem=registry.ca_file.read_text()),
    )
    try:
        yield client
    finally:
        client.close()


def push_base(
    registry: RegistryService, directory: Path, *, sizes: tuple[int, ...] = (1000,)
) -> str:
    """Push the base image; return its pull spec."""
    layout = ImageLayout(directory / "base-layout")
    layout.create()
    write_base_image(layout, "base", sizes=sizes)
    image = layout.read_named("base")
    with open_client(registry) as client:
        upload_image(client, BASE_REPOSITORY, layout, image, FetchOutput())
        client.put_manifest(BASE_REPOSITORY, "1", image.media_type, image.content)
    return f"{registry.host}/{BASE_REPOSITORY}@{image.digest}"


def make_builder(
    registry: RegistryService, place: Path, lines: list[str], **settings: object
) -> LocalBuilder:
    """Make a builder with the logins of the registry; its environment has a variable to hide."""
    pull, push = place / "pull.json", place / "push.json"
    pull.write_bytes(registry.make_auth_json(PULLER))
    push.write_bytes(registry.make_auth_json(PUSHER))
    values: dict[str, object] = {
        "directory": place / "builds",
        "pull_secret": pull,
        "push_secret": push,
        "ca": registry.ca_file,
        **settings,
    }
    return make_local_builder(
        LocalSettings(**values),  # type: ignore[arg-type]
        lines.append,
    )


def make_local_builder(settings: LocalSettings, show_line: Callable[[str], None]) -> LocalBuilder:
    maps = choose_id_maps(
        os.geteuid(), getpass.getuser(), os.getegid(), proc=Path("/proc"), etc=Path("/etc")
    )
    environ = {**os.environ, "SESSION_TOKEN": "token-of-the-user"}
    return LocalBuilder(settings, environ, SystemClock(), maps, show_line)


def make_spec(registry: RegistryService, **values: str) -> BuildSpec:
    return BuildSpec(
        push_spec=f"{registry.host}/os/node:built",
        architecture=ARCHITECTURE,
        cache_repository=values.get("cache_repository", ""),
    )


def run_phases(build: LocalBuild) -> BuildResult:
    """Run the phases until one fails; return its result, or that of the push."""
    result = build.run_phase(BuildPhase.FETCH)
    for phase in (BuildPhase.BUILD, BuildPhase.PUSH):
        if result.has_succeeded:
            result = build.run_phase(phase)
    return result
