"""Resolves the tag of a base image for ``treenail-controller build``, without a cluster."""

import argparse
import os
from dataclasses import replace

from treenail.api.machineosconfig import MachineOSConfig
from treenail.builder.phases.registries import RegistrySettings
from treenail.clock import Clock
from treenail.config.pullsecret import PullSecret
from treenail.controllers.image_build.cluster_reader import ClusterReader
from treenail.controllers.image_build.planner import ResolveTag
from treenail.errors import CredentialError, TreenailError
from treenail.image.push_spec import parse_push_spec
from treenail.kube.resources import SECRETS
from treenail.registry.images import resolve_image


class TagUnresolvedError(TreenailError):
    """The tag of a base image cannot be resolved."""


def make_tag_resolver(arguments: argparse.Namespace, clock: Clock) -> ResolveTag:
    """Make a resolver with the login and the CA of the arguments, otherwise of the input."""

    def resolve(config: MachineOSConfig, reader: ClusterReader) -> str:
        spec = parse_push_spec(config.base_image, where="the base image")
        settings = RegistrySettings.read(arguments.pull_secret, arguments.ca, os.environ)
        if arguments.pull_secret is None:
            settings = replace(settings, secret=_read_login(config, reader))
        if arguments.ca is None:
            ca_pem = reader.read_ca(spec.registry)
            settings = replace(settings, tls=replace(settings.tls, ca_pem=ca_pem))
        try:
            with settings.open_client(spec.registry, spec.repository, clock) as client:
                first, *others = arguments.architectures
                found = resolve_image(client, spec.repository, spec.tag, first)
                digest = found.index_digest or found.digest
                for each in others:
                    # By digest: the tag may move between two requests.
                    resolve_image(client, spec.repository, digest, each)
        except TreenailError as error:
            raise TagUnresolvedError(
                f"cannot resolve the base image {config.base_image}: {error}",
                remedy="name a login with --pull-secret FILE and a CA with --ca FILE, or name the "
                "base by digest",
            ) from error
        return spec.make_pull_spec(digest)

    return resolve


def _read_login(config: MachineOSConfig, reader: ClusterReader) -> PullSecret:
    """Read the login of the input; files without the Secret mean anonymous access."""
    name = config.base_pull_secret
    if name and reader.find_object(SECRETS, name) is None:
        return PullSecret()
    try:
        return reader.read_base_login(name)
    except CredentialError as error:
        remedy = "correct it in the input, or name a login with --pull-secret FILE"
        raise CredentialError(str(error), remedy=remedy) from error
