"""What `store.hub` needs of huggingface_hub beyond its public interface."""

from delta_weight_sync.compat import Feature, Package, Probe

HUB = Package(("huggingface_hub",), tested=("1.33", "2.4"))


def _buckets(probe: Probe) -> None:
    """`hub` registers many objects in one request, and uploads with a token that it keeps.
    (Public functions for this would end these uses. We have proposed none.)"""
    probe.accepts("huggingface_hub._buckets", "_BucketAddFile", "source", "destination", "xet_hash")
    probe.find("huggingface_hub.utils._http", "_GLOBAL_CLIENT_FACTORY")
    xet = "huggingface_hub.utils._xet"
    probe.find(xet, "XET_CONNECTION_INFO_CACHE.clear")
    probe.exactly(xet, "XetFileData", "file_hash", "refresh_route")
    probe.accepts(xet, "refresh_xet_connection_info", "file_data", "headers")
    probe.accepts(xet, "xet_headers_without_auth", "headers")


BUCKETS = Feature(HUB, "buckets on the Hub", _buckets)
FEATURES: tuple[Feature, ...] = (BUCKETS,)
