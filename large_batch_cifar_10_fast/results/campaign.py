"""Reading a file of bounded size."""

from ..settings.settings import ConfigError

LARGEST = 64 << 20  # bytes; a hundred thousand runs are less


def read_bounded(source: str) -> bytes:
    """Return a file's content; raise ConfigError if it cannot be read or is too large for a log."""
    try:
        with open(source, "rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error})") from error
    if len(content) > LARGEST:
        raise ConfigError(f"{source}: larger than {LARGEST >> 20} MiB, so no log or table of runs: name another file")
    return content
