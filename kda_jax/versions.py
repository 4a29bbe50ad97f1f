"""Which jax and flax go together: pip does not prevent the pair that fails to import."""

from importlib.metadata import PackageNotFoundError, version


def problem() -> str | None:
    """One sentence about the installed jax and flax, or None if they go together."""
    try:
        jax, flax = version("jax"), version("flax")
    except PackageNotFoundError as missing:
        return f"the package {missing.name} is not installed; `pip install kda-jax` brings it"
    return clash(jax, flax)


def clash(jax: str, flax: str) -> str | None:
    """As `problem`, for given versions.

    Example:
        >>> clash("0.10.2", "0.12.8") is None
        True
        >>> clash("0.12.0", "0.12.8")
        'flax 0.12.8 does not import with jax 0.12.0: install flax>=0.12.12 (Python 3.12 or newer), or jax<0.11'
    """
    if _numbers(jax) >= (0, 11) and _numbers(flax) < (0, 12, 10):
        return f"flax {flax} does not import with jax {jax}: install flax>=0.12.12 (Python 3.12 or newer), or jax<0.11"
    return None


def require() -> None:
    """Raise ImportError with the sentence of `problem`."""
    if sentence := problem():
        raise ImportError(sentence)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdecimal())
