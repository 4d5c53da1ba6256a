"""A stand-in; see the package."""


def get_ip() -> str:
    return "127.0.0.1"


def get_open_port() -> int:
    return 51216
