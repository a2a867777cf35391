"""Who asks, as far as limits go.

On the Hub every connection comes from its proxy, which names the client in `X-Forwarded-For`. Each proxy
appends the address that it was asked from, so the last one that is not of a private network is the client's;
what stands before it, the client may have written itself. uvicorn reads it so, given the networks that it
may believe. Who is counted wrongly takes places from other visitors at most, never from who has the key.
"""

from ipaddress import IPv6Address, ip_address, ip_network

from starlette.types import Scope

# Where proxies stand: this machine, and the private networks of RFC 1918, 4193 and 6598.
PROXIES = "127.0.0.0/8,::1,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,100.64.0.0/10,fc00::/7"
_CUSTOMER = 64  # bits of an IPv6 address that name a network; its other half each customer may choose


def client_of(scope: Scope) -> str:
    """The address of who asks; of IPv6 its network, for one customer has all addresses in it."""
    host, _ = scope.get("client") or ("", 0)
    try:
        address = ip_address(host)
    except ValueError:
        return "unknown"
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or ip_network((address.packed, _CUSTOMER), strict=False))
    return str(address)
