"""Makes what resolves the tags of pools. Its registry client is imported at the first tag."""

import os
from collections.abc import Callable

from treenail.clock import Clock
from treenail.controllers.pools.image_tags import LazyTagSource, TagSource
from treenail.errors import UsageError
from treenail.kube.client import Client


def make_tag_source(
    client: Client, clock: Clock, find_namespace: Callable[[], str]
) -> LazyTagSource:
    """Make a source that reads logins from the namespace of the controllers."""

    def make() -> TagSource:
        from treenail.controllers.image_build.cluster_reader import ClusterReader
        from treenail.controllers.image_build.layer_builder import TagResolver
        from treenail.registry.proxies import read_proxy_settings

        try:
            namespace = find_namespace()
        except UsageError:
            # On a host, without --namespace.
            namespace = "default"
        reader = ClusterReader(client, clock, namespace=namespace)
        return TagResolver(reader, clock, proxies=read_proxy_settings(os.environ))

    return LazyTagSource(make)
