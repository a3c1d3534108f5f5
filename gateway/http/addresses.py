"""Client addresses: what counts as one client where connections and failed keys are counted."""

import ipaddress

IPV6_CLIENT_BITS = 64  # a provider gives one customer at least a /64, so single addresses are free


def network_of(address: str) -> str:
    """Return the network whose addresses are counted as one client.

    That is an IPv4 address itself and an IPv6 address's /64. What is no address, such as the peer
    of a Unix socket, is returned as it is.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, IPV6_CLIENT_BITS), strict=False))
